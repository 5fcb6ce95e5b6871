"""Counts how many drafts each request offers to verification: by what was drafted, by confidence, by a budget of rows.

All of it is decided on the device and before a draft is judged, from what was known before the draft was drawn, so that
a request's text keeps the target's distribution whatever is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spec_kernels.confidence_reference import count_offered_reference
from spec_lab.acceptance.confidences import DraftConfidences

CountOffered = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int, float | None, int | None], torch.Tensor
]
"""Is `spec_kernels.confidence_reference.count_offered_reference`, or a kernel that does the same."""


class DraftOffers:
    """Counts the drafts that slots offer.

    Attributes:
        num_drafted: [num_slots + 1] how many wait in a slot, of K there can be.
    """

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        confidences: DraftConfidences | None = None,
        budget: int | None = None,
        count: CountOffered = count_offered_reference,
    ) -> None:
        """Set the ends that a request's drafts may have before K.

        Args:
            confidences: what the drafter notes, and the threshold under which it ends; None where nothing reads them.
            budget: rows a round over the batch, pending tokens with them; None for as many as there are.
            count: counts them.
        """
        assert confidences is not None or budget is None, "a budget reads confidences"
        self._confidences = confidences
        self._budget = budget
        self._count = count
        if confidences is None:
            self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        else:
            self.num_drafted = confidences.num_drafted

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor, most: int) -> torch.Tensor:
        """Count the offered drafts [batch] of `slot_ids` [batch], `most` of each; rows that are not `active` [batch]
        offer none."""
        kept = self._confidences
        survival, threshold = (None, None) if kept is None else (kept.survival, kept.threshold)
        return self._count(slot_ids, active, self.num_drafted, survival, most, threshold, self._budget)

    def expect(self, slot_ids: torch.Tensor, num_drafts: int) -> None:
        """Say that so many drafts will wait in `slot_ids` [batch], where no draft is noted as it is made."""
        if self._confidences is None or num_drafts == 0:
            self.num_drafted.index_fill_(0, slot_ids, num_drafts)

    @property
    def may_stop(self) -> bool:
        """Tell whether a request's drafting may end before K."""
        return self._confidences is not None and self._confidences.threshold is not None

    @property
    def num_going_on(self) -> torch.Tensor:
        """Return [1], how many requests of the batch want a draft behind the newest: a tensor that each draft moves."""
        assert self._confidences is not None and self.may_stop
        return self._confidences.num_going_on
