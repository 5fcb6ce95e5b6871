"""One kernel notes in each draft step the confidence in its drafts; with a threshold it also counts the requests that
want another draft. A second kernel decides in each round how many drafts each request offers.

A draft step of a small drafter is some thirty launches. With the eleven more that torch needs to store confidences,
stopping early would save nothing.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_MOST_REQUESTS = 1024
_OTHERS = 32
"""The number of requests whose drafts are compared with one request's at a time."""


@triton.jit(do_not_specialize=["batch", "num_slots"])
def _note(
    survival_ptr: tl.tensor,
    running_ptr: tl.tensor,
    num_drafted_ptr: tl.tensor,
    num_going_on_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    column_ptr: tl.tensor,
    threshold: tl.tensor,
    batch: tl.tensor,
    num_slots: tl.tensor,
    survival_stride: tl.tensor,
    IS_FIRST: tl.constexpr,
    MAY_STOP: tl.constexpr,
    REQUEST_TILE: tl.constexpr,
) -> None:
    """Stores the confidence of one draft of all requests."""
    requests = tl.arange(0, REQUEST_TILE)
    is_request = requests < batch
    slots = tl.load(slot_ids_ptr + requests, mask=is_request, other=0)
    product = tl.load(probabilities_ptr + requests, mask=is_request, other=0.0)
    column = tl.zeros((1,), tl.int64)
    if not IS_FIRST:
        column += tl.load(column_ptr)
        product = tl.load(running_ptr + slots, mask=is_request, other=0.0) * product
    tl.store(running_ptr + slots, product, mask=is_request)
    tl.store(survival_ptr + slots * survival_stride + column, product, mask=is_request)
    tl.store(num_drafted_ptr + slots, tl.broadcast_to(column + 1, (REQUEST_TILE,)), mask=is_request)
    if MAY_STOP:
        goes_on = is_request & (slots != num_slots - 1) & (product >= threshold)
        tl.store(num_going_on_ptr, tl.sum(goes_on.to(tl.int64), 0))


@operator("note_confidence", mutates_args=("survival", "running", "num_drafted", "num_going_on"))
def note_confidence(
    survival: torch.Tensor,
    running: torch.Tensor,
    num_drafted: torch.Tensor,
    num_going_on: torch.Tensor,
    slot_ids: torch.Tensor,
    probabilities: torch.Tensor,
    column: torch.Tensor | None,
    threshold: float | None,
) -> None:
    """Store the confidence in a draft of each of up to 1024 requests. With a threshold, count those that go on.

    Args:
        survival: [num_slots + 1, K] float32; the product of a slot's probabilities up to this draft is written.
        running: [num_slots + 1] float32, the same product, for the next draft.
        num_drafted: [num_slots + 1] int64, written: the drafts made so far.
        num_going_on: [1] int64, written: requests whose product is at least `threshold`, not counting the scratch slot
            (the last); not written if `threshold` is None.
        slot_ids: [batch] int64.
        probabilities: [batch] float32.
        column: [1] int64 the index of the draft, from 0; None for the first, which begins a product.
        threshold: a request whose product is below this wants no other draft.
    """
    num_slots, num_draft_tokens = survival.shape
    (batch,) = slot_ids.shape
    assert 0 < batch <= _MOST_REQUESTS
    assert_rows_of(survival, num_slots, num_draft_tokens)
    assert_rows_of(probabilities, batch)
    for vector in (running, num_drafted):
        assert_rows_of(vector, num_slots)
    assert_rows_of(num_going_on, 1)
    assert slot_ids.is_contiguous()
    with launch_on(survival):
        _note[(1,)](
            survival,
            running,
            num_drafted,
            num_going_on,
            slot_ids,
            probabilities,
            slot_ids if column is None else column,
            threshold or 0.0,
            batch,
            num_slots,
            survival.stride(0),
            IS_FIRST=column is None,
            MAY_STOP=threshold is not None,
            REQUEST_TILE=triton.next_power_of_2(batch),
        )


class DraftedSlots(NamedTuple):
    """Pointers to the slot of each request and whether it is active, and to what each slot keeps of its drafts."""

    ids: tl.tensor
    active: tl.tensor
    num_drafted: tl.tensor
    survival: tl.tensor


@triton.jit
def _load_offered(
    of: DraftedSlots,
    requests: tl.tensor,
    columns: tl.tensor,
    most: tl.tensor,
    threshold: tl.tensor,
    batch: tl.tensor,
    survival_stride: tl.tensor,
    MAY_STOP: tl.constexpr,
    HAS_BUDGET: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Loads the survival of drafts (0 without a budget), whether they are offered if the budget allows it, and whether
    their request is active."""
    is_request = requests < batch
    slots = tl.load(of.ids + requests, mask=is_request, other=0)
    is_active = is_request & (tl.load(of.active + requests, mask=is_request, other=0) != 0)
    num_drafted = tl.load(of.num_drafted + slots, mask=is_active, other=0)
    is_offered = is_active & (columns < num_drafted) & (columns < most)
    row = of.survival + slots * survival_stride
    survival = tl.zeros_like(columns).to(tl.float32)
    if HAS_BUDGET:
        survival = tl.load(row + columns, mask=is_offered, other=0.0)
    if MAY_STOP:
        before = tl.load(row + columns - 1, mask=is_offered & (columns > 0), other=float("inf"))
        is_offered = is_offered & (before >= threshold)
    return survival, is_offered, is_active


@triton.jit(do_not_specialize=["most", "budget", "batch"])
def _count_offered(
    offered_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    active_ptr: tl.tensor,
    num_drafted_ptr: tl.tensor,
    survival_ptr: tl.tensor,
    most: tl.tensor,
    threshold: tl.tensor,
    budget: tl.tensor,
    batch: tl.tensor,
    survival_stride: tl.tensor,
    MAY_STOP: tl.constexpr,
    HAS_BUDGET: tl.constexpr,
    DRAFT_TILE: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """Counts the offered drafts of one request. A draft's rank is the number of offered drafts of higher survival, or
    of equal survival and an earlier place."""
    request = tl.program_id(0)
    columns = tl.arange(0, DRAFT_TILE)
    of = DraftedSlots(slot_ids_ptr, active_ptr, num_drafted_ptr, survival_ptr)
    requests = request + tl.zeros_like(columns)
    survival, is_offered, _ = _load_offered(
        of, requests, columns, most, threshold, batch, survival_stride, MAY_STOP, HAS_BUDGET
    )
    if HAS_BUDGET:
        place = request * DRAFT_TILE + columns
        rank = tl.zeros((DRAFT_TILE,), tl.int32)
        num_active = 0
        for first in range(0, batch, OTHERS):
            others = first * DRAFT_TILE + tl.arange(0, OTHERS * DRAFT_TILE)
            other_requests, other_columns = others // DRAFT_TILE, others % DRAFT_TILE
            other_survival, other_offered, other_active = _load_offered(
                of, other_requests, other_columns, most, threshold, batch, survival_stride, MAY_STOP, HAS_BUDGET
            )
            is_likelier = other_survival[None, :] > survival[:, None]
            is_earlier = (other_survival[None, :] == survival[:, None]) & (others[None, :] < place[:, None])
            rank += tl.sum((other_offered[None, :] & (is_likelier | is_earlier)).to(tl.int32), 1)
            num_active += tl.sum((other_active & (other_columns == 0)).to(tl.int32), 0)
        is_offered = is_offered & (rank < budget - num_active)
    tl.store(offered_ptr + request, tl.sum(is_offered.to(tl.int64), 0))


@operator("count_offered", mutates_args=("offered",))
def _launch(
    offered: torch.Tensor,
    slot_ids: torch.Tensor,
    active: torch.Tensor,
    num_drafted: torch.Tensor,
    survival: torch.Tensor | None,
    most: int,
    threshold: float | None,
    budget: int | None,
) -> None:
    (batch,), (num_slots,) = slot_ids.shape, num_drafted.shape
    for vector in (offered, slot_ids, active):
        assert_rows_of(vector, batch)
    if survival is None:
        assert threshold is None and budget is None
    else:
        assert_rows_of(survival, num_slots, survival.shape[1])
        assert most <= survival.shape[1]
    with launch_on(num_drafted):
        _count_offered[(batch,)](
            offered,
            slot_ids,
            active,
            num_drafted,
            num_drafted if survival is None else survival,
            most,
            threshold or 0.0,
            budget or 0,
            batch,
            0 if survival is None else survival.stride(0),
            MAY_STOP=threshold is not None,
            HAS_BUDGET=budget is not None,
            DRAFT_TILE=triton.next_power_of_2(max(most, 1)),
            OTHERS=_OTHERS,
        )


def count_offered(
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
        active: [batch] bool; inactive requests offer none.
        num_drafted: [num_slots + 1] int64, drafts that each slot holds.
        survival: [num_slots + 1, K] float32 the product of top-1 probabilities up to each draft. It never grows along a
            row; entries after the slot's drafts are stale. None if it is not used.
        most: the most drafts of each request.
        threshold: the first draft whose product is below this is the last one; None for no such limit.
        budget: verify rows over the whole batch. Each active request's pending token takes one, and the drafts
            likeliest to be accepted take the others. None for no limit.
    """
    offered = torch.empty_like(slot_ids)
    _launch(offered, slot_ids, active, num_drafted, survival, most, threshold, budget)
    return offered
