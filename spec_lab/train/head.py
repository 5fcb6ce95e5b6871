"""What the trainer asks of a kind of head: one class, with its knobs, in one file of `spec_lab.train.heads`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import Tap
from spec_lab.core.errors import UserError
from spec_lab.train.config import Loss
from spec_lab.train.data import Texts
from spec_lab.train.group import Processes
from spec_lab.train.packed import PackedRows
from spec_lab.train.target import FrozenTarget

if TYPE_CHECKING:
    from spec_lab.engine.engine import Engine
    from spec_lab.train.serving import Serving


@dataclass(slots=True)
class Forced:
    """Acceptance by teacher forcing: an estimate, since the head reads the text's tokens instead of its own drafts.

    Attributes:
        reached: by draft, the anchors whose earlier drafts all equal the target's likeliest tokens.
        matched: by draft, those of them whose draft does too.
        lost: sum over rows of the target's probability outside the draft vocabulary.
    """

    reached: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    lost: float = 0.0
    num_rows: int = 0

    def report(self) -> dict[str, Any]:
        """Return rates by draft, the acceptance length that they give, and the mean probability lost."""
        rates = [matched / max(reached, 1) for matched, reached in zip(self.matched, self.reached, strict=True)]
        survival, length = 1.0, 1.0
        for rate in rates:
            survival *= rate
            length += survival
        lost = self.lost / max(self.num_rows, 1)
        return {"conditional_rates": rates, "acceptance_length": length, "lost_probability": lost}


@dataclass
class HeadRecipe(ABC):
    """A kind of head: its knobs, and how it is made, stored and read on packed rows.

    A module of it holds the weights that are trained. Batches have rows of whole texts, [batch, length].
    """

    name: str = MISSING
    loss: Loss = Loss.kl

    @property
    def run_words(self) -> tuple[str, ...]:
        """The overrides besides `drafter=` with which a run uses everything that was trained."""
        return ()

    @abstractmethod
    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the layers' hidden states that it reads; the last state is no tap."""

    @abstractmethod
    def build(self, target: FrozenTarget, texts: Texts, seed: int) -> Any:
        """Make the module that training starts from."""

    @abstractmethod
    def save(self, module: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it in the form that the engine loads."""

    @abstractmethod
    def load(self, folder: Path, target: FrozenTarget) -> Any:
        """Read what `save` wrote, its weights held in float32."""

    @abstractmethod
    def describe(self) -> str:
        """Return a sentence for the card."""

    @abstractmethod
    def drawn(self, rows: PackedRows, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw what a step needs besides its rows, such as anchors [batch, anchors]."""

    @abstractmethod
    def inputs(self, module: Any, target: FrozenTarget, rows: PackedRows, *drawn: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the loss, without gradients. A captured step runs this too."""

    @abstractmethod
    def loss_module(self, module: Any, target: FrozenTarget, group: Processes) -> nn.Module:
        """Return a module whose parameters are those of `module`, and whose output for `inputs` is the loss."""

    @abstractmethod
    def laws(self, module: Any, target: FrozenTarget, rows: PackedRows, pending: Tensor, num_drafts: int) -> Tensor:
        """Return training's logits of the drafts after the columns `pending` of one row: [pending, drafts, scored]."""

    @abstractmethod
    def served(self, serving: Serving, engine: Engine, text: Tensor, prompt_length: int) -> Tensor:
        """Return the engine's logits of the drafts after a prompt: [drafts, scored]."""

    @abstractmethod
    def forced(self, module: Any, target: FrozenTarget, rows: PackedRows, num_drafts: int, batch_size: int) -> Forced:
        """Count by teacher forcing over rows."""

    def compiled(self, loss: nn.Module) -> Callable[..., Tensor]:
        """Return a faster function for a loss module on a GPU."""
        return loss


@dataclass
class LayerSizes:
    """The sizes of a head's layer that has its own keys and values; null takes that of the target's layer."""

    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None

    def filled(self, like: LayerPlan) -> dict[str, int]:
        """Return the four sizes for a target with such layers."""
        own = {name: getattr(self, name) for name in asdict(LayerSizes())}
        return {name: getattr(like, name) if size is None else size for name, size in own.items()}


def draft_vocabulary(texts: Texts, target: FrozenTarget, size: int | None) -> Tensor:
    """Return the ascending ids of the tokens that a head drafts: those that end a text, and those that the target wrote
    most often, `size` in total; all of the target's if it has no more, or `size` is None."""
    vocab_size, always = target.config.vocab_size, sorted(target.config.eos_token_ids)
    if size is None or size >= vocab_size:
        return torch.arange(vocab_size)
    if size < len(always):
        raise UserError(f"drafter.draft_vocab_size={size} is below the {len(always)} tokens that end a text; raise it")
    counts = texts.counts(vocab_size)
    counts[always] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def vocabulary_maps(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return the maps of a checkpoint: `i + d2t[i]` is the target id of draft id i, and `t2d[v]` says whether target id
    v has a draft id."""
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }
