"""Counts how many drafts each request offers to verification: by what was drafted, by confidence, by a budget of rows.

All of it is decided on the device and before a draft is judged, from what was known before the draft was drawn, so that
a request's text keeps the target's distribution whatever is left out.
"""

from __future__ import annotations

import torch

from spec_lab.acceptance.confidences import DraftConfidences, RowConfidences
from spec_lab.core.rows import rows_at
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet, Op


def count_offered(
    slot_ids: torch.Tensor,
    active: torch.Tensor,
    num_drafted: torch.Tensor,
    survival: torch.Tensor | None,
    most: int,
    threshold: float | None,
    budget: int | None,
) -> torch.Tensor:
    """Count the drafts [batch] that `slot_ids` [batch] offer, `most` at most; rows not `active` [batch] offer none.

    A request's drafts end with the first whose survival [num_slots + 1, K] falls under the threshold. A budget of rows
    over the batch, pending tokens among them, goes to the drafts likeliest to survive. None is no such end.
    """
    offered = torch.where(active, num_drafted.index_select(0, slot_ids).clamp(max=most), 0)
    if survival is None:
        return offered
    survival = survival.index_select(0, slot_ids)[:, :most]
    is_offered = torch.arange(most, device=offered.device) < offered.unsqueeze(1)
    if threshold is not None:
        goes_on = survival[:, :-1] >= threshold
        is_offered = is_offered & torch.cat((torch.ones_like(is_offered[:, :1]), goes_on), dim=1)
    if budget is not None:
        is_offered = is_offered & are_within_budget(survival, is_offered, budget - active.sum())
    return is_offered.sum(dim=1)


def are_within_budget(survival: torch.Tensor, is_offered: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """Tell of each draft [batch, K] whether it is among the `num_rows` (a number) likeliest to survive of those that
    `is_offered` [batch, K] admits, over the whole batch.

    A request's survival [batch, K] never grows along its drafts and the sort is stable, so what is kept of a request
    has no hole, and its share does not depend on its later drafts (vLLM's adaptive verification ranks the same way,
    #47808). Of equals the earlier row of the batch comes first. The rows of a tree, and logarithms, do as well: a draft
    is never likelier than its parent, and stands behind it.
    """
    order = torch.where(is_offered, survival, float("-inf")).flatten().sort(descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return ranks.view(is_offered.shape) < num_rows


class DraftOffers:
    """Counts the drafts that slots offer.

    Attributes:
        num_drafted: [num_slots + 1] how many wait in a slot, of K there can be.
        limits: [num_slots + 1] how many a slot's request may offer; None where that is K of each.
    """

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        confidences: DraftConfidences | None = None,
        budget: int | None = None,
        kernels: KernelSet = TORCH_FORMS,
        by_request: bool = False,
    ) -> None:
        """Set the ends that a request's drafts may have before K.

        Args:
            confidences: what the drafter notes, and the threshold under which it ends; None where nothing reads them.
            budget: rows a round over the batch, pending tokens with them; None for as many as there are.
            by_request: slots are told a limit of their own.
        """
        assert confidences is not None or budget is None, "a budget reads confidences"
        self.confidences = confidences
        self._budget = budget
        self._count = kernels.get(Op.COUNT_OFFERED, count_offered)
        if confidences is None:
            self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        else:
            self.num_drafted = confidences.num_drafted
        self.limits = torch.zeros_like(self.num_drafted) if by_request else None

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor, most: int) -> torch.Tensor:
        """Count the offered drafts [batch] of `slot_ids` [batch], `most` of each; rows that are not `active` [batch]
        offer none."""
        kept = self.confidences
        survival, threshold = (None, None) if kept is None else (kept.survival, kept.threshold)
        waiting = self.num_drafted if self.limits is None else torch.minimum(self.num_drafted, self.limits)
        return self._count(slot_ids, active, waiting, survival, most, threshold, self._budget)

    def confidences_of(self, slot_ids: torch.Tensor, num_drafts: int) -> torch.Tensor | None:
        """Copy what was noted [batch, num_drafts] of the first drafts of `slot_ids` [batch]; None where nothing was."""
        kept = self.confidences
        return None if kept is None else kept.survival.index_select(0, slot_ids)[:, :num_drafts]

    def limit(self, slots: list[int], most: list[int]) -> None:
        """Tell `slots` how many drafts each of their requests may offer; the host waits for nothing."""
        assert self.limits is not None, "only slots with limits of their own are told"
        told = torch.tensor([slots, most], pin_memory=self.limits.is_cuda)
        slot_ids, values = told.to(self.limits.device, non_blocking=True).unbind(0)
        self.limits.index_copy_(0, slot_ids, values)

    def expect(self, slot_ids: torch.Tensor, num_drafts: int) -> None:
        """Say that so many drafts will wait in `slot_ids` [batch], where no draft is noted as it is made."""
        if self.confidences is None or num_drafts == 0:
            self.num_drafted.index_fill_(0, slot_ids, num_drafts)

    @property
    def num_going_on(self) -> torch.Tensor | None:
        """Return [1], how many requests of the batch want a draft behind the newest: a tensor that each draft moves.

        None where no request's drafting ends before K.
        """
        kept = self.confidences
        return None if kept is None or kept.threshold is None else kept.num_going_on


class RowOffers:
    """Says which rows of a tree slots offer: those that hold a draft, or as many of them as a budget has room for."""

    def __init__(self, confidences: RowConfidences, budget: int | None = None) -> None:
        """`budget`: rows a round over the batch, roots with them; None for as many as there are."""
        self._confidences = confidences
        self._budget = budget

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Tell of each draft [batch, N - 1] of `slot_ids` [batch] whether it is offered; rows that are not `active`
        [batch] offer none. Where a draft is, so is its parent."""
        scores = rows_at(self._confidences.scores, slot_ids)
        is_offered = active.unsqueeze(1) & (scores > -torch.inf)
        if self._budget is None:
            return is_offered
        return is_offered & are_within_budget(scores, is_offered, self._budget - active.sum())

    def num_drafted(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """Count the drafts [batch] that the trees in `slot_ids` [batch] hold."""
        return (rows_at(self._confidences.scores, slot_ids) > -torch.inf).sum(dim=1)

    @property
    def num_going_on(self) -> torch.Tensor | None:
        """Return [1], how many requests of the batch want a level behind the newest; None where none ends early."""
        return self._confidences.num_going_on if self._confidences.may_end else None
