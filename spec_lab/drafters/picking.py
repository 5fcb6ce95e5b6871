"""Picks the drafts of a model: the likeliest token, or a sample from its distribution, which is kept for
verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.acceptance.draft_sampling import DraftLogits, sample_and_keep
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.prompts import PromptEnds


class DraftHead(Protocol):
    """Turns a draft model's output [batch, hidden_size] into tokens or logits in target ids."""

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens [batch]."""
        ...

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens [batch] and their probabilities [batch] at temperature 1."""
        ...

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, vocab], -inf outside the draft vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """The requests that draft: slot_ids [batch], and kv_lens [batch], L of the round that verifies the drafts."""

    slot_ids: torch.Tensor
    kv_lens: torch.Tensor

    @classmethod
    def of_prompts(cls, ends: PromptEnds) -> DraftedRows:
        """Return the requests whose prompts have ended."""
        return cls(ends.slot_ids, ends.kv_lens)


class DraftPicker(Protocol):
    """Picks a draft for each row, and keeps the logits that verification needs.

    Attributes:
        takes_likeliest: whether each pick is that of `DraftHead.greedy`, and nothing is kept.
    """

    takes_likeliest: bool

    def pick(
        self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows, column: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pick the draft of `column` [1], from 0; None for draft 1."""
        ...

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [batch, K, vocab] that verification takes as the distribution q of the drafts of
        `slot_ids`; None if their q is one-hot."""
        ...


class GivenDrafts:
    """Mixin for drafts whose logits are not kept. Verification takes their q as one-hot."""

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return None


class GreedyPicker(GivenDrafts):
    """Picks the likeliest token."""

    takes_likeliest = True

    def pick(
        self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows, column: torch.Tensor | None = None
    ) -> torch.Tensor:
        return head.greedy(hidden)


class SamplingPicker:
    """Samples from the draft distribution at a temperature, and keeps its logits by slot and step."""

    takes_likeliest = False

    def __init__(
        self, temperature: float, seeds: SlotSeeds, kept: DraftLogits, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        self._temperature = temperature
        self.seeds = seeds
        self.kept = kept
        self._sample = kernels.get(Op.SAMPLE_DRAFT, sample_and_keep)
        self._first_column = torch.zeros(1, dtype=torch.int64, device=seeds.values.device)

    def pick(
        self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows, column: torch.Tensor | None = None
    ) -> torch.Tensor:
        column = self._first_column if column is None else column
        logits = head.target_logits(hidden)
        slot_ids, slot_seeds = rows.slot_ids, self.seeds.values
        return self._sample(self.kept.values, logits, slot_ids, slot_seeds, rows.kv_lens, column, self._temperature)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.kept.of(slot_ids)
