"""Plain torch notes here how sure a drafter is of its drafts, step by step, and counts how many of them are offered.

`kernels=torch` runs these functions.
"""

from __future__ import annotations

import torch


def note_confidence_reference(
    survival: torch.Tensor,
    running: torch.Tensor,
    num_drafted: torch.Tensor,
    num_going_on: torch.Tensor,
    slot_ids: torch.Tensor,
    probabilities: torch.Tensor,
    column: torch.Tensor | None,
    threshold: float | None,
) -> None:
    """Note the top-1 probability of a draft of each request, and say how many requests want another draft.

    Args:
        survival: [num_slots + 1, K] float32; the product of a slot's probabilities up to this draft is written.
        running: [num_slots + 1] float32, the same product, for the next draft.
        num_drafted: [num_slots + 1] int64, written: the drafts made so far.
        num_going_on: [1] int64, written: requests whose product is not under `threshold`, without the scratch slot, the
            last; left alone where that is None.
        slot_ids: [batch] int64.
        probabilities: [batch] float32.
        column: [1] int64 which draft it is, from 0; None for the first, which begins a product.
        threshold: under which nothing more is drafted.
    """
    if column is None:
        product = probabilities
        survival[:, 0].index_copy_(0, slot_ids, product)
        num_drafted.index_fill_(0, slot_ids, 1)
    else:
        product = running.index_select(0, slot_ids) * probabilities
        survival.index_put_((slot_ids, column.expand_as(slot_ids)), product)
        num_drafted.index_copy_(0, slot_ids, (column + 1).expand_as(slot_ids))
    running.index_copy_(0, slot_ids, product)
    if threshold is not None:
        goes_on = (product >= threshold) & (slot_ids != survival.shape[0] - 1)
        num_going_on.copy_(goes_on.sum())


def count_offered_reference(
    slot_ids: torch.Tensor,
    active: torch.Tensor,
    num_drafted: torch.Tensor,
    survival: torch.Tensor | None,
    most: int,
    threshold: float | None,
    budget: int | None,
) -> torch.Tensor:
    """Count the offered drafts [batch], int64.

    Args:
        slot_ids: [batch] int64.
        active: [batch] bool; other rows offer none.
        num_drafted: [num_slots + 1] int64, drafts that wait in a slot.
        survival: [num_slots + 1, K] float32 the product of top-1 probabilities up to each of them, which never grows
            along a row; behind those that wait stands what an earlier round noted. None where nothing goes by it.
        most: of each request.
        threshold: the draft at which the product falls under it is the last; None for no such end.
        budget: rows over the batch, one for each active row's pending token among them, the others for the drafts
            likeliest to survive; None for as many as there are.
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
    #47808). Of equals the earlier row of the batch comes first.
    """
    order = torch.where(is_offered, survival, -1.0).flatten().sort(descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return ranks.view(is_offered.shape) < num_rows
