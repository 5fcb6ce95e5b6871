"""Counts how many drafts each request offers to verification: by what was drafted, by confidence, by a budget of rows.

All of it is decided on the device and before a draft is judged, from what was known before the draft was drawn, so that
a request's text keeps the target's distribution whatever is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.acceptance.confidences import DraftConfidences


@dataclass(frozen=True, slots=True)
class OfferRule:
    """The ends that a request's drafts may have before K.

    Attributes:
        threshold: drafting ends with the draft at which the product of the top-1 probabilities falls under this; that
            draft is still offered, since it has been made. None for no such end.
        budget: rows a round over the batch, pending tokens with them; None for as many as there are.
    """

    threshold: float | None = None
    budget: int | None = None


class DraftOffers:
    """Counts the drafts that slots offer. `num_drafted` [num_slots + 1]: how many wait in a slot, of K there can be."""

    def __init__(
        self, num_slots: int, rule: OfferRule, confidences: DraftConfidences | None, device: torch.device
    ) -> None:
        """`confidences` are None where nothing reads them."""
        assert confidences is not None or rule == OfferRule(), "a threshold and a budget read confidences"
        self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._rule = rule
        self._confidences = confidences

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor, most: int) -> torch.Tensor:
        """Count the offered drafts [batch] of `slot_ids` [batch], `most` of each; rows that are not `active` [batch]
        offer none."""
        offered = torch.where(active, self.num_drafted.index_select(0, slot_ids).clamp(max=most), 0)
        if self._confidences is None:
            return offered
        survival = self._confidences.of(slot_ids)[:, :most]
        # Behind the drafts that wait in a slot stands what an earlier round noted there.
        is_offered = torch.arange(most, device=offered.device) < offered.unsqueeze(1)
        if self._rule.threshold is not None:
            goes_on = survival[:, :-1] >= self._rule.threshold
            is_offered = is_offered & torch.cat((torch.ones_like(is_offered[:, :1]), goes_on), dim=1)
        if self._rule.budget is not None:
            is_offered = is_offered & are_within_budget(survival, is_offered, self._rule.budget - active.sum())
        return is_offered.sum(dim=1)

    @property
    def may_stop(self) -> bool:
        """Tell whether a request's drafting may end before K."""
        return self._rule.threshold is not None

    def going_on(self, slot_ids: torch.Tensor, column: int) -> torch.Tensor:
        """Say of `slot_ids` [batch] whether they offer what would follow their draft of `column`, from 0: 1 or 0, and 0
        of the scratch slot."""
        assert self._confidences is not None and self._rule.threshold is not None
        survival = self._confidences.survival[:, column].index_select(0, slot_ids)
        scratch_slot = self.num_drafted.shape[0] - 1
        return ((survival >= self._rule.threshold) & (slot_ids != scratch_slot)).long()


def are_within_budget(survival: torch.Tensor, is_offered: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """Tell of each draft [batch, K] whether it is among the `num_rows` (a number) likeliest to survive of those that
    `is_offered` [batch, K] admits, over the whole batch.

    A request's survival [batch, K] never grows along its drafts and the sort is stable, so what is kept of a request
    has no hole, and its share does not depend on its later drafts (vLLM's adaptive verification ranks the same way,
    #47808). Of equals the earlier row of the batch comes first.
    """
    order = torch.where(is_offered, survival, -1.0).flatten().sort(descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return ranks.view(is_offered.shape) < num_rows
