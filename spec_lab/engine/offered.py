"""Decides how many of its drafts each request offers for verification.

A request's own limit, the drafter's confidence and a row budget for the whole batch can reduce the number. The survival
of a draft is the estimated probability that it and all drafts before it are accepted.

The decision is made on the device, before drafts are judged. Whether a sampled draft is offered depends neither on its
own token nor on later tokens of its request. So the output keeps the target's distribution, whichever drafts are left
out.
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
    """Count the drafts [batch] that `slot_ids` [batch] offer: up to `most`, and none where `active` [batch] is false.

    A request offers no draft after the first whose survival [num_slots + 1, K] is below `threshold`. `budget` limits
    the rows of the whole batch. Each active request's pending token takes one, and the drafts with the highest survival
    take the rest. None means no limit of that kind.
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
    """Return, for each draft [batch, K], whether it is one of the `num_rows` (a 0-d tensor) with the highest survival.

    Drafts of the whole batch compete. Those outside `is_offered` [batch, K] come last, but are true too if rows are
    left for them, so the caller masks them. Of equals, the draft of the earlier request wins, and within a request the
    earlier draft.

    A request's survival [batch, K] never grows along its drafts, and the sort is stable. So the kept drafts of a
    request are its first ones, and later drafts do not affect them. vLLM's adaptive verification (#47808) ranks in the
    same way. The ranking also works with logarithms, and for rows of a tree: a row's survival never exceeds its
    parent's.
    """
    order = torch.where(is_offered, survival, float("-inf")).flatten().sort(descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return ranks.view(is_offered.shape) < num_rows


class DraftOffers:
    """Counts the drafts that slots offer.

    Attributes:
        num_drafted: [num_slots + 1] drafts that each slot holds, up to K.
        limits: [num_slots + 1] drafts that each slot's request may offer; None if all may offer K.
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
        """Set the limits by which a request offers fewer than K drafts.

        Args:
            confidences: the drafter's confidences and their threshold; None if nothing reads them.
            budget: the most rows that a round verifies for the whole batch, with pending tokens; None for no limit.
            by_request: each request has its own limit, set with `limit`.
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
        """Count the offered drafts [batch] of `slot_ids` [batch]: up to `most`, and none where `active` [batch] is
        false."""
        kept = self.confidences
        survival, threshold = (None, None) if kept is None else (kept.survival, kept.threshold)
        waiting = self.num_drafted if self.limits is None else torch.minimum(self.num_drafted, self.limits)
        return self._count(slot_ids, active, waiting, survival, most, threshold, self._budget)

    def confidences_of(self, slot_ids: torch.Tensor, num_drafts: int) -> torch.Tensor | None:
        """Copy the survival [batch, num_drafts] of the first drafts of `slot_ids` [batch]; None without confidences."""
        kept = self.confidences
        return None if kept is None else kept.survival.index_select(0, slot_ids)[:, :num_drafts]

    def limit(self, slots: list[int], most: list[int]) -> None:
        """Set how many drafts the request in each of `slots` may offer, without a synchronisation."""
        assert self.limits is not None, "limits are set only if each request has its own (by_request)"
        told = torch.tensor([slots, most], pin_memory=self.limits.is_cuda)
        slot_ids, values = told.to(self.limits.device, non_blocking=True).unbind(0)
        self.limits.index_copy_(0, slot_ids, values)

    def expect(self, slot_ids: torch.Tensor, num_drafts: int) -> None:
        """Record that `slot_ids` [batch] will hold `num_drafts` drafts each.

        With confidences each draft is counted when it is made. Then this method does nothing unless `num_drafts` is 0.
        """
        if self.confidences is None or num_drafts == 0:
            self.num_drafted.index_fill_(0, slot_ids, num_drafts)

    @property
    def num_going_on(self) -> torch.Tensor | None:
        """Return the tensor [1] that counts the requests of the batch which want another draft. Each step updates it.

        None if no request stops early.
        """
        kept = self.confidences
        return None if kept is None or kept.threshold is None else kept.num_going_on


class RowOffers:
    """Decides which rows of a tree each slot offers: all that hold a draft, or the best of them within a row budget."""

    def __init__(self, confidences: RowConfidences, budget: int | None = None) -> None:
        """`budget`: the most rows that a round verifies for the whole batch, including roots; None for no limit."""
        self._confidences = confidences
        self._budget = budget

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Return, for each draft [batch, N - 1] of `slot_ids` [batch], whether it is offered.

        An offered draft's parent is offered too. If `active` [batch] is false, no draft is offered.
        """
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
        """Return the tensor [1] that counts the requests which want another level; None if no request stops early."""
        return self._confidences.num_going_on if self._confidences.may_end else None
