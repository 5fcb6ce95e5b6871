"""Proves that a head's training forward and the engine's draft steps give the same logits for the same rows.

Both compute on a CPU in float32, from the exported files, so only a mistake can make them differ by more than rounding.
`prove_rounded` compares the training forward with an engine in 16 bits too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spec_lab.core.errors import Breakdown
from spec_lab.core.types import Request
from spec_lab.export.layouts import write_layout
from spec_lab.record.draft_counts import acceptance_length
from spec_lab.train.head import HeadRecipe
from spec_lab.train.packed import PackedRows
from spec_lab.train.serving import Serving, for_a_while
from spec_lab.train.target import FrozenTarget

TOLERANCE = 1e-4
"""The largest allowed difference of logits in float32, relative to the largest logit."""
BOUND_IN_16_BITS = 0.1
"""The largest allowed difference in 16 bits, relative to the variation of logits within a row (root mean squares).

Rounding to bfloat16 in each layer makes a difference of a few hundredths; for SmolLM2's head it is .013. Taps from a
wrong layer give .2, and a wrong position gives .5."""
TEXT_LENGTHS = (40, 56)
"""The lengths of the two texts used for the comparison, which share one row of the training forward."""
ORACLE_ROUNDS = 4
"""The fewest rounds that the oracle decodes after each text."""


class NotServed(Breakdown):
    """The training forward and the engine disagree. The message describes the difference."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The largest difference of logits at each position, and whether the drafts are equal."""

    differences: list[float]
    largest_logit: float
    same_drafts: bool

    def require(self) -> None:
        """Raise NotServed if the two disagree."""
        worst = max(self.differences)
        if worst > TOLERANCE * max(self.largest_logit, 1.0) or not self.same_drafts:
            raise NotServed(
                f"the training forward and the engine differ by {worst:g} in logits of up to "
                f"{self.largest_logit:g}, by position {[f'{d:g}' for d in self.differences]}: "
                "this is a mistake of the lab"
            )


def compared(trained: Tensor, served: Tensor) -> Proof:
    """Compare logits [places, K, scored]; unscored tokens are -inf in both."""
    apart = torch.where(trained == served, 0.0, (trained - served).abs())
    tops = trained.masked_fill(trained.isinf(), 0.0).abs().amax(-1)
    # Different tokens count as equal drafts if their logits differ by no more than rounding.
    behind = trained.amax(-1) - trained.gather(-1, served.argmax(-1, keepdim=True)).squeeze(-1)
    same = bool((behind <= TOLERANCE * tops.clamp(min=1.0)).all())
    return Proof(apart.amax((0, 2)).tolist(), float(tops.max()), same)


def apart_by_rounding(trained: Tensor, served: Tensor) -> float:
    """Return the difference of logits [places, K, scored], relative to their variation; unscored tokens are -inf."""
    is_scored = ~(trained.isinf() | served.isinf())
    count = is_scored.sum(-1, keepdim=True).clamp(min=1)
    difference, varied = (torch.where(is_scored, each, 0.0) for each in (trained - served, trained))
    rows = [torch.where(is_scored, each - each.sum(-1, keepdim=True) / count, 0.0) for each in (difference, varied)]
    apart, size = (row.square().sum() for row in rows)
    return float((apart / size.clamp(min=1e-12)).sqrt())


@dataclass(frozen=True, slots=True)
class Prover:
    """A target in the training's and in the engine's form, both in float32, and texts on which to compare heads.

    Attributes:
        path: the target's checkpoint.
    """

    path: Path
    target: FrozenTarget
    serving: Serving
    texts: tuple[Tensor, ...]
    head: HeadRecipe

    @classmethod
    def of(cls, path: Path, tokens: Tensor, num_draft_tokens: int, head: HeadRecipe) -> Prover:
        """Load the target of `path` twice. `tokens` [any number of ids] is text of any kind."""
        cpu, longest = torch.device("cpu"), max(TEXT_LENGTHS) + ORACLE_ROUNDS * (num_draft_tokens + 1)
        longest += num_draft_tokens
        target = FrozenTarget.load(path, cpu, torch.float32, longest)
        words = "dtype=float32", "kernels=torch", "batch_size=1"
        serving = Serving.load(path, cpu, num_draft_tokens, longest, *words, of_drafter=head.run_words)
        # A short text is repeated, since its meaning does not matter here.
        text = tokens.long().repeat(-(-sum(TEXT_LENGTHS) // len(tokens)))[: sum(TEXT_LENGTHS)]
        return cls(path, target, serving, text.split(list(TEXT_LENGTHS)), head=head)

    def prove(self, folder: Path) -> Proof:
        """Compare an export's training forward with the engine, and raise NotServed if they disagree.

        Both use the exported values. They are compared after several prefixes of each text, used as prompts.
        """
        proof = compared(*self._laws(folder, self.serving))
        proof.require()
        return proof

    @for_a_while()
    def prove_rounded(self, folder: Path, device: torch.device) -> float:
        """Compare the training forward in float32 with an engine in bfloat16, and return the difference.

        Raises:
            NotServed: it exceeds `BOUND_IN_16_BITS`.
        """
        longest = len(self.serving.longest.prompt_ids) + self.serving.longest.max_new_tokens
        words, num_drafts = ("dtype=bfloat16", "kernels=torch", "batch_size=1"), self.serving.num_draft_tokens
        serving = Serving.load(self.path, device, num_drafts, longest, *words, of_drafter=self.head.run_words)
        trained, served = self._laws(folder, serving)
        apart = apart_by_rounding(trained, served.to(trained))
        if apart > BOUND_IN_16_BITS:
            raise NotServed(
                f"served in bfloat16 the head differs from the training forward by {apart:.3f} of the variation of its "
                f"logits, but rounding explains at most {BOUND_IN_16_BITS:g}: this is a mistake of the lab"
            )
        return apart

    def _laws(self, folder: Path, serving: Serving) -> tuple[Tensor, Tensor]:
        """Return an export's logits in the training forward and in an engine, [places, K, scored] each."""
        num_drafts, head = serving.num_draft_tokens, self.head
        module, engine = head.load(folder, self.target).eval(), serving.engine(head.name, folder)
        rows, starts = packed_texts(self.texts)
        places = [
            (text, start, length)
            for text, start in zip(self.texts, starts, strict=True)
            for length in sorted({2, len(text) // 2, len(text) - num_drafts - 1})
        ]
        pending = torch.tensor([start + length for _, start, length in places])
        trained = head.laws(module, self.target, rows, pending, num_drafts)
        served = torch.stack([head.served(serving, engine, text, length) for text, _, length in places])
        return trained, served

    def write_layouts(self, names: Iterable[str], folder: Path) -> None:
        """Write a head's folder in other projects' layouts, each into a folder within it, and read each back.

        Raises:
            UserError: a layout that is not known for the head, or that cannot hold it.
            NotServed: the engine's logits are not those of the head's own layout.
        """
        for name in names:
            write_layout(name, folder, folder / name, self.path, self.serving.num_draft_tokens)
            self.require_same(folder, folder / name)

    def require_same(self, folder: Path, other: Path) -> None:
        """Raise NotServed if the engine's logits change when it reads a head in another layout."""
        for text in self.texts:
            engines = (self.serving.engine(self.head.name, each) for each in (folder, other))
            if not torch.equal(*(self.head.served(self.serving, each, text, len(text) // 2) for each in engines)):
                raise NotServed(f"{other} drafts differently from {folder}: this is a mistake of the lab")

    def require_oracle(self) -> None:
        """Raise NotServed if the oracle's drafts, which are always right, are not all accepted."""
        num_drafts = self.serving.num_draft_tokens
        requests = [
            Request(f"text_{index}", "", tuple(text.tolist()), ORACLE_ROUNDS * (num_drafts + 1), ignore_eos=True)
            for index, text in enumerate(self.texts)
        ]
        reached = acceptance_length(self.serving.decode("oracle", None, requests), num_drafts)
        if reached != num_drafts + 1:
            raise NotServed(f"the oracle reaches {reached}, not {num_drafts + 1}: this is a mistake of the lab")


def packed_texts(texts: Sequence[Tensor]) -> tuple[PackedRows, list[int]]:
    """Pack texts into one row, with all tokens supervised; also return where each begins."""
    tokens, lengths = torch.cat(list(texts))[None], torch.tensor([len(text) for text in texts])
    segments = torch.repeat_interleave(torch.arange(1, len(texts) + 1), lengths)[None]
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    starts = (lengths.cumsum(0) - lengths).tolist()
    return PackedRows(tokens, segments, positions, torch.ones_like(tokens, dtype=torch.bool)), starts
