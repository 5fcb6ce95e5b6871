"""How many of the drafts in its slot each request offers for verification.

Whether a sampled draft is offered depends neither on its own token nor on later tokens of its request. So the output
keeps the target's distribution, whichever drafts are left out.
"""

from __future__ import annotations

import torch

from spec_lab.acceptance.confidences import RowConfidences
from spec_lab.core.rows import rows_at
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet, Op


def count_offered(
    slot_ids: torch.Tensor, active: torch.Tensor, num_drafted: torch.Tensor, limits: torch.Tensor, most: int
) -> torch.Tensor:
    """Count the drafts [batch] that `slot_ids` [batch] offer: up to `most`, and none where `active` [batch] is false.

    Each slot has `num_drafted` [num_slots + 1] drafts, of which its request offers at most `limits` [num_slots + 1].
    """
    waiting = torch.minimum(num_drafted, limits).index_select(0, slot_ids)
    return torch.where(active, waiting.clamp(max=most), 0)


class DraftOffers:
    """Counts the drafts that slots offer.

    Attributes:
        num_drafted: [num_slots + 1] drafts that each slot holds, up to K.
        limits: [num_slots + 1] drafts that each slot's request may offer.
    """

    def __init__(
        self, num_slots: int, num_draft_tokens: int, device: torch.device, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        self._count = kernels.get(Op.COUNT_OFFERED, count_offered)
        self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.limits = torch.full_like(self.num_drafted, num_draft_tokens)

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor, most: int) -> torch.Tensor:
        """Count the offered drafts [batch] of `slot_ids` [batch]: up to `most`, and none where `active` [batch] is
        false."""
        return self._count(slot_ids, active, self.num_drafted, self.limits, most)

    def expect(self, slot_ids: torch.Tensor, num_drafts: int) -> None:
        """Record that `slot_ids` [batch] will hold `num_drafts` drafts each."""
        self.num_drafted.index_fill_(0, slot_ids, num_drafts)


class RowOffers:
    """Decides which rows of a tree each slot offers: those whose paths the drafter finds likeliest."""

    def __init__(self, confidences: RowConfidences) -> None:
        self._confidences = confidences

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor, most: int) -> torch.Tensor:
        """Return, for each draft [batch, N - 1] of `slot_ids` [batch], whether it is one of the likeliest `most`.

        A row's score never exceeds its parent's, and of equals the earlier row wins. So an offered draft's parent is
        offered too. If `active` [batch] is false, no draft is offered.
        """
        scores = rows_at(self._confidences.scores, slot_ids)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True) & active.unsqueeze(1)

    def confidences_of(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """Return how likely the path to each draft [batch, N - 1] of `slot_ids` [batch] is, the likeliest first."""
        return rows_at(self._confidences.scores, slot_ids).exp().sort(dim=1, descending=True).values
