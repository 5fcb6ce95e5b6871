"""The shared parts of unrolled drafters: the batch, the loss, and the agreement with a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.train.drafter import DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import UnrolledTrainingConfig
from spec_lab.train.generations import Generations
from spec_lab.train.loop import CurvePoint, train
from spec_lab.train.losses import LOSSES, RowLoss, against_distribution
from spec_lab.train.packed_rows import RowPlaces
from spec_lab.train.target import run_target

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


class TapsRead(Protocol):
    """The outputs of a target forward that drafters read."""

    @property
    def final_hidden(self) -> Tensor:
        """`[batch, length, hidden]` after the last norm."""

    def taps(self) -> Tensor:
        """Return `[batch, length, taps * hidden]`: the tapped states, concatenated."""


class UnrolledDrafter(nn.Module, ABC):
    """The interface of a drafter for the loss and the evaluation. The module holds the drafter's own parameters only.

    Texts of `length` tokens have `rows = length - 1` rows: row p takes token p+1 and the target's states at p.
    """

    @abstractmethod
    def features(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the states of the target that the drafter reads, at positions 0..length-2."""

    @abstractmethod
    def unroll(
        self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, rows: RowPlaces | None = None
    ) -> list[Tensor]:
        """Return a state `[batch, rows, ...]` for each step. Row p of `embeddings` `[batch, rows, hidden]` is token
        p+1's.

        Row p of step s drafts token p+2 from the anchor p-s. It uses the inputs known at the anchor, and the text's
        tokens p-s+2..p+1 as the earlier drafts. Rows p < s may hold any finite values. `rows` gives their places if
        several documents share a row; without it each row is one document.
        """

    @abstractmethod
    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[batch, rows, draft_vocab_size]`."""

    @abstractmethod
    def draft_token_ids(self) -> Tensor:
        """Return `[draft_vocab_size]`: the target id of every draft id."""


class UnderFrozenHead(UnrolledDrafter):
    """Modules that read the target's final hidden state, and use the target's head.

    Attributes:
        head_weight: `[vocab, hidden]` of the target.
    """

    head_weight: Tensor

    def features(self, outputs: TapsRead) -> tuple[Tensor, ...]:
        """Return the final hidden state after the norm, `[batch, rows, hidden]`."""
        return (outputs.final_hidden[:, :-1],)

    def draft_token_ids(self) -> Tensor:
        """Return the whole vocabulary."""
        return torch.arange(len(self.head_weight), device=self.head_weight.device)

    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[..., vocab]` from the module's output, which is already normed."""
        return F.linear(state.to(self.head_weight.dtype), self.head_weight)


def train_unrolled(drafter: UnrolledDrafter, config: UnrolledTrainingConfig, task: TrainingTask) -> list[CurvePoint]:
    """Train `drafter` in place on the task's texts. It stays on the task's device."""
    drafter.to(task.device)
    generations = task.generations.to(task.device)

    def batch_of(step: int) -> tuple[Tensor, ...]:
        return generations.batch(step, config.optimisation.batch_size, task.seed).tensors()

    def inputs_of(*picked: Tensor) -> tuple[Tensor, ...]:
        return unrolling_batch(task.model, drafter, Generations(*picked))

    loss = UnrolledLoss(drafter, config.num_unrolled_steps, config.step_loss_decay, LOSSES[config.loss])
    return train(loss, batch_of, config.optimisation, task.checkpoint, task.device, inputs_of)


def unrolled_loss_words(config: UnrolledTrainingConfig) -> str:
    """Describe `UnrolledLoss` for a card."""
    decay = config.step_loss_decay
    return f"over {config.num_unrolled_steps} steps of EAGLE-3's training-time test, step i counting {decay:g}^i"


@torch.no_grad()
def unrolling_batch(model: Qwen3ForCausalLM, drafter: UnrolledDrafter, picked: Generations) -> tuple[Tensor, ...]:
    """Return the inputs of `UnrolledLoss` from rows of texts."""
    tokens = picked.tokens.long()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.device.type == "cuda"):
        outputs = run_target(model, tokens)
    embeddings = model.get_input_embeddings()(tokens[:, 1:])
    labels = soft_labels(outputs.logits, drafter.draft_token_ids(), picked)
    return embeddings, *labels, *drafter.features(outputs)


def soft_labels(logits: Tensor, draft_token_ids: Tensor, picked: Generations) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the labels of a text's rows, and which rows count.

    `log_p` `[batch, rows, draft_vocab_size]`: row p drafts token p+2, so its label is the target's log-probabilities at
    position p+1. `ends_in_text` bool `[batch, rows]`: token p+2 is within the text. `from_first` `[batch, rows]`: the
    distance of row p from the first anchor, which is the last position of the prompt.
    """
    log_p = logits[:, 1:].float().log_softmax(-1)[..., draft_token_ids]
    row = torch.arange(logits.shape[1] - 1, device=logits.device)
    ends_in_text = row + 2 < picked.lengths[:, None]
    first_anchor = picked.prompt_lengths[:, None] - 1
    return log_p, ends_in_text, row - first_anchor


class UnrolledLoss(nn.Module):
    """The loss of every step (`spec_lab.train.losses`); step i has the weight `decay ** i`."""

    def __init__(
        self,
        drafter: UnrolledDrafter,
        num_steps: int,
        step_loss_decay: float,
        row_loss: RowLoss = against_distribution,
    ) -> None:
        super().__init__()
        self.row_loss = row_loss
        self.drafter = drafter
        self.num_steps = num_steps
        self.step_loss_decay = step_loss_decay

    def forward(
        self,
        embeddings: Tensor,
        log_p: Tensor,
        ends_in_text: Tensor,
        from_first: Tensor,
        *features: Tensor,
    ) -> Tensor:
        """Compute the loss against `soft_labels`. Chains count if their anchor is at or after the last prompt
        position."""
        total = torch.zeros((), device=embeddings.device)
        sum_weights = 0.0
        for step, state in enumerate(self.drafter.unroll(embeddings, features, self.num_steps)):
            counts = ends_in_text & (from_first >= step)
            weight = self.step_loss_decay**step
            row_loss = self.row_loss(self.drafter.draft_logits(state), log_p)
            total = total + weight * torch.where(counts, row_loss, 0.0).sum() / counts.sum().clamp(min=1)
            sum_weights += weight
        return total / sum_weights


def unrolled_matcher(drafter: UnrolledDrafter, model: Qwen3ForCausalLM) -> DraftMatcher:
    """Make a function that tells where the drafter agrees with a text, in the dtype of its weights."""
    target_ids = drafter.draft_token_ids()

    @torch.no_grad()
    def match(tokens: Tensor, num_draft_tokens: int) -> Tensor:
        features = drafter.features(run_target(model, tokens))
        embeddings = model.get_input_embeddings()(tokens[:, 1:])
        states = drafter.unroll(embeddings, features, num_draft_tokens)
        return agreement(tokens, [target_ids[drafter.draft_logits(state).argmax(-1)] for state in states])

    return match


def agreement(tokens: Tensor, drafts: Sequence[Tensor]) -> Tensor:
    """Return `DraftMatcher`'s answer for `tokens` `[batch, length]`, from the drafts `[batch, length - 1]` of every
    step.

    `drafts[s][:, p]` is drafted for token p+2 from the anchor p-s.
    """
    matches = torch.zeros(*tokens.shape, len(drafts), dtype=torch.bool, device=tokens.device)
    for step, drafted in enumerate(drafts):
        agrees = drafted[:, step:-1] == tokens[:, step + 2 :]
        matches[:, : agrees.shape[1], step] = agrees
    return matches
