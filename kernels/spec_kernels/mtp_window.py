"""Slides the windows of vanilla MTP in place: each slot's last K input tokens and their target hidden states.

TensorRT-LLM also shifts its pool in place (`mtp_update_hidden_states_op`), by a strided copy without a barrier. For a
prompt shorter than K that copy reads memory before the start of the prompt. Here a program owns some channels of one
slot. All its threads read their part of the K rows before any of them writes.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_TILE_ELEMENTS = 2048


@triton.jit(do_not_specialize=["window_rows"])
def _slide(
    window_tokens_ptr: tl.tensor,
    window_hidden_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    num_valid_ptr: tl.tensor,
    window_rows: tl.tensor,
    token_stride: tl.tensor,
    hidden_request_stride: tl.tensor,
    hidden_row_stride: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Slides CHANNEL_TILE channels of one window; the first tile also slides its tokens."""
    request = tl.program_id(0).to(tl.int64)
    num_valid = tl.load(num_valid_ptr + request)
    if num_valid > 0:
        slot = tl.load(slot_ids_ptr + request)
        rows = tl.arange(0, ROW_TILE)
        channels = (tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE))[None, :]
        source = rows + num_valid
        is_row = rows < window_rows
        is_old = is_row & (source < window_rows)
        is_new = is_row & (source >= window_rows)
        own_rows = slot * window_rows + rows
        old_rows = slot * window_rows + source
        new_rows = source - window_rows
        is_channel = channels < HIDDEN_SIZE
        is_first = tl.program_id(1) == 0

        old_ptrs = window_hidden_ptr + old_rows[:, None] * HIDDEN_SIZE + channels
        new_ptrs = hidden_ptr + request * hidden_request_stride + new_rows[:, None] * hidden_row_stride + channels
        old_hidden = tl.load(old_ptrs, mask=is_old[:, None] & is_channel, other=0.0)
        new_hidden = tl.load(new_ptrs, mask=is_new[:, None] & is_channel, other=0.0)
        old_tokens = tl.load(window_tokens_ptr + old_rows, mask=is_old & is_first, other=0)
        new_tokens = tl.load(tokens_ptr + request * token_stride + new_rows, mask=is_new & is_first, other=0)
        tl.debug_barrier()  # no thread may overwrite a row that another has not read yet
        own_ptrs = window_hidden_ptr + own_rows[:, None] * HIDDEN_SIZE + channels
        tl.store(own_ptrs, tl.where(is_old[:, None], old_hidden, new_hidden), mask=is_row[:, None] & is_channel)
        tl.store(window_tokens_ptr + own_rows, tl.where(is_old, old_tokens, new_tokens), mask=is_row & is_first)


@operator("slide_windows", mutates_args=("window_tokens", "window_hidden"))
def slide_windows(
    window_tokens: torch.Tensor,
    window_hidden: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    slot_ids: torch.Tensor,
    num_valid: torch.Tensor,
) -> None:
    """Replace each slot's window by the last K rows of the old window followed by the first `num_valid` inputs.

    Args:
        window_tokens: [num_slots + 1, K] int64, contiguous, written at `slot_ids`.
        window_hidden: [num_slots + 1, K, hidden_size], contiguous, also written at `slot_ids`.
        tokens: [batch, rows] int64 inputs of this round, or of a prompt chunk.
        hidden: [batch, rows, hidden_size] their target hidden states, of the window's dtype.
        slot_ids: [batch] int64; requests may share a slot only if their `num_valid` is 0.
        num_valid: [batch] int64, 0 to rows; a window with 0 is neither read nor written.
    """
    num_windows, window_rows, hidden_size = window_hidden.shape
    batch, num_rows = tokens.shape
    assert_rows_of(window_tokens, num_windows, window_rows)
    assert_rows_of(tokens, batch, num_rows)
    assert_rows_of(hidden, batch, num_rows, hidden_size)
    assert_rows_of(slot_ids, batch)
    assert_rows_of(num_valid, batch)
    assert window_tokens.is_contiguous() and window_hidden.is_contiguous() and hidden.dtype == window_hidden.dtype
    row_tile = triton.next_power_of_2(window_rows)
    channel_tile = min(triton.next_power_of_2(hidden_size), max(16, _TILE_ELEMENTS // row_tile))
    with launch_on(window_hidden):
        _slide[(batch, triton.cdiv(hidden_size, channel_tile))](
            window_tokens,
            window_hidden,
            tokens,
            hidden,
            slot_ids,
            num_valid,
            window_rows,
            tokens.stride(0),
            hidden.stride(0),
            hidden.stride(1),
            HIDDEN_SIZE=hidden_size,
            ROW_TILE=row_tile,
            CHANNEL_TILE=channel_tile,
        )
