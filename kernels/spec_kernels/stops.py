"""Decides which requests go on after a round, in one launch. torch needs some fifteen, and in a graph each node between
two rounds costs as much as a small kernel."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on


@triton.jit(do_not_specialize=["num_rows", "num_ends", "scratch_slot"])
def _going_on(
    next_ids_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    num_emitted_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    end_lens_ptr: tl.tensor,
    heeds_eos_ptr: tl.tensor,
    eos_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_ends: tl.tensor,
    scratch_slot: tl.tensor,
    ROW_TILE: tl.constexpr,
    END_TILE: tl.constexpr,
    ONLY_LAST: tl.constexpr,
) -> None:
    """Decides for one request."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ids_ptr + request)
    last = tl.load(num_emitted_ptr + request) - 1
    columns = tl.arange(0, ROW_TILE)
    is_decided = columns <= last
    if ONLY_LAST:
        is_decided = columns == last
    tokens = tl.load(tokens_ptr + request * num_rows + columns, mask=is_decided, other=-1)
    ends = tl.arange(0, END_TILE)
    eos = tl.load(eos_ptr + ends, mask=ends < num_ends, other=-2)
    is_end = (tokens[:, None] == eos[None, :]).to(tl.int64)
    num_found = tl.sum(tl.sum(is_end, axis=1), axis=0) * tl.load(heeds_eos_ptr + slot)
    has_all = tl.load(kv_lens_ptr + slot) >= tl.load(end_lens_ptr + slot)
    tl.store(next_ids_ptr + request, tl.where((num_found > 0) | has_all, scratch_slot, slot))


@operator("going_on")
def going_on(
    slot_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    kv_lens: torch.Tensor,
    end_lens: torch.Tensor,
    heeds_eos: torch.Tensor,
    eos_token_ids: torch.Tensor,
    only_last: bool,
) -> torch.Tensor:
    """Return the slots [batch] of the next round: the scratch slot, the last one, for requests that have ended.

    Args:
        slot_ids: [batch] of the round just committed.
        tokens: [batch, N] emitted tokens, junk from column `num_emitted` [batch] on.
        kv_lens: [num_slots + 1] committed lengths after the round.
        end_lens: [num_slots + 1] the length at which a request has all its tokens; 0 for the scratch slot.
        heeds_eos: [num_slots + 1] int64, 1 if an end of sequence ends the request, else 0.
        eos_token_ids: [any number].
        only_last: only the last emitted token can be an end of sequence.
    """
    batch, num_rows = tokens.shape
    num_slots, num_ends = kv_lens.shape[0], eos_token_ids.shape[0]
    for tensor in (slot_ids, num_emitted):
        assert_rows_of(tensor, batch)
    for tensor in (kv_lens, end_lens, heeds_eos):
        assert_rows_of(tensor, num_slots)
    assert tokens.is_contiguous() and eos_token_ids.is_contiguous()
    next_ids = torch.empty_like(slot_ids)
    with launch_on(tokens):
        _going_on[(batch,)](
            next_ids,
            slot_ids,
            tokens,
            num_emitted,
            kv_lens,
            end_lens,
            heeds_eos,
            eos_token_ids,
            num_rows,
            num_ends,
            num_slots - 1,
            ROW_TILE=triton.next_power_of_2(num_rows),
            END_TILE=triton.next_power_of_2(max(num_ends, 1)),
            ONLY_LAST=only_last,
        )
    return next_ids
