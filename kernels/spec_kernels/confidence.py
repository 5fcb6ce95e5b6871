"""One kernel notes in each draft step the confidence in its drafts. A second kernel decides in each round how many
drafts each request offers.

A draft step of a small drafter is some thirty launches, and torch needs eleven more to store confidences.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_MOST_REQUESTS = 1024


@triton.jit(do_not_specialize=["batch"])
def _note(
    survival_ptr: tl.tensor,
    running_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    column_ptr: tl.tensor,
    batch: tl.tensor,
    survival_stride: tl.tensor,
    IS_FIRST: tl.constexpr,
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


@operator("note_confidence", mutates_args=("survival", "running"))
def note_confidence(
    survival: torch.Tensor,
    running: torch.Tensor,
    slot_ids: torch.Tensor,
    probabilities: torch.Tensor,
    column: torch.Tensor | None,
) -> None:
    """Store the confidence in a draft of each of up to 1024 requests.

    Args:
        survival: [num_slots + 1, K] float32; the product of a slot's probabilities up to this draft is written.
        running: [num_slots + 1] float32, the same product, for the next draft.
        slot_ids: [batch] int64.
        probabilities: [batch] float32.
        column: [1] int64 the index of the draft, from 0; None for the first, which begins a product.
    """
    num_slots, num_draft_tokens = survival.shape
    (batch,) = slot_ids.shape
    assert 0 < batch <= _MOST_REQUESTS
    assert_rows_of(survival, num_slots, num_draft_tokens)
    assert_rows_of(probabilities, batch)
    assert_rows_of(running, num_slots)
    assert slot_ids.is_contiguous()
    with launch_on(survival):
        _note[(1,)](
            survival,
            running,
            slot_ids,
            probabilities,
            slot_ids if column is None else column,
            batch,
            survival.stride(0),
            IS_FIRST=column is None,
            REQUEST_TILE=triton.next_power_of_2(batch),
        )


@triton.jit(do_not_specialize=["most", "batch"])
def _count_offered(
    offered_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    active_ptr: tl.tensor,
    num_drafted_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    most: tl.tensor,
    batch: tl.tensor,
    REQUEST_TILE: tl.constexpr,
) -> None:
    """Counts the offered drafts of all requests."""
    requests = tl.arange(0, REQUEST_TILE)
    is_request = requests < batch
    slots = tl.load(slot_ids_ptr + requests, mask=is_request, other=0)
    is_active = is_request & (tl.load(active_ptr + requests, mask=is_request, other=0) != 0)
    num_drafted = tl.load(num_drafted_ptr + slots, mask=is_active, other=0)
    limits = tl.load(limits_ptr + slots, mask=is_active, other=0)
    tl.store(offered_ptr + requests, tl.minimum(tl.minimum(num_drafted, limits), most), mask=is_request)


@operator("count_offered")
def count_offered(
    slot_ids: torch.Tensor, active: torch.Tensor, num_drafted: torch.Tensor, limits: torch.Tensor, most: int
) -> torch.Tensor:
    """Count the offered drafts [batch], int64, of up to 1024 requests.

    Args:
        slot_ids: [batch] int64.
        active: [batch] bool; inactive requests offer none.
        num_drafted: [num_slots + 1] int64, drafts that each slot holds.
        limits: [num_slots + 1] int64, the most drafts of each slot's request.
        most: the most drafts of any request.
    """
    (batch,), (num_slots,) = slot_ids.shape, num_drafted.shape
    assert 0 < batch <= _MOST_REQUESTS
    for vector in (slot_ids, active):
        assert_rows_of(vector, batch)
    assert_rows_of(limits, num_slots)
    offered = torch.empty_like(slot_ids)
    with launch_on(num_drafted):
        _count_offered[(1,)](
            offered,
            slot_ids,
            active,
            num_drafted,
            limits,
            most,
            batch,
            REQUEST_TILE=triton.next_power_of_2(batch),
        )
    return offered
