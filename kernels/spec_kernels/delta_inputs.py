"""The inputs of the gated delta rule: causal convolution, normed queries and keys, decay and strength.

The convolution's window is kept for later rows. Its columns follow vLLM's scheme (`causal_conv1d`,
num_accepted_tokens). After verify, column r + i holds the i-th input (from 0) of those that precede row r + 1, for
every r. So nothing is moved once the number of accepted rows is known. FLA and vLLM norm queries and keys inside the
rule's kernel. Here they are normed once for each key head, instead of for each tile of each value head.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_whole, launch_on

_ROW_TILE = 16
"""The same in every launch, so that the order of a norm's summation does not depend on the number of rows."""


class Inputs(NamedTuple):
    """Pointers to the window of one slot and to a request's projected rows; also the window's column of the oldest
    input that row 0 sees, and the stride of rows."""

    window: tl.tensor
    raw: tl.tensor
    begin: tl.tensor
    row_stride: tl.tensor


@triton.jit
def _convolve(
    of: Inputs,
    conv_weight_ptr: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    CONV_SIZE: tl.constexpr,
    HISTORY: tl.constexpr,
) -> tl.tensor:
    """Return the causal convolution [rows, channels]. The request's first HISTORY rows also read the window."""
    total = tl.zeros((rows.shape[0], channels.shape[0]), dtype=tl.float32)
    for tap in tl.static_range(HISTORY + 1):
        source = rows + tap - HISTORY
        is_new = (is_row & (source >= 0))[:, None] & is_channel[None, :]
        is_old = (is_row & (source < 0))[:, None] & is_channel[None, :]
        new_ptrs = of.raw + (source.to(tl.int64) * of.row_stride)[:, None] + channels[None, :]
        old_ptrs = of.window + ((of.begin + HISTORY + source) * CONV_SIZE)[:, None] + channels[None, :]
        taken = tl.where(is_old, tl.load(old_ptrs, mask=is_old), tl.load(new_ptrs, mask=is_new)).to(tl.float32)
        weight = tl.load(conv_weight_ptr + channels * (HISTORY + 1) + tap, mask=is_channel, other=0.0)
        total += tl.where(is_old | is_new, taken, 0.0) * weight[None, :]
    return total


@triton.jit
def _slide_window(
    of: Inputs,
    num_rows: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    CONV_SIZE: tl.constexpr,
    HISTORY: tl.constexpr,
    HISTORY_TILE: tl.constexpr,
    IS_PROMPT: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> None:
    """Write the window of one slot, whose old inputs start at column `of.begin`. After verify it holds all old and new
    inputs but the first; after a prompt's rows the last HISTORY."""
    first = num_rows if IS_PROMPT else 1
    num_kept = HISTORY if IS_PROMPT else HISTORY - 1 + num_rows
    columns = tl.arange(0, HISTORY_TILE)
    is_old = (first + columns < HISTORY)[:, None] & is_channel[None, :]
    old_ptrs = of.window + ((of.begin + first + columns) * CONV_SIZE)[:, None] + channels[None, :]
    old = tl.load(old_ptrs, mask=is_old)
    tl.debug_barrier()  # no thread may overwrite what another has not read yet, here or in the convolution
    tl.store(of.window + (columns * CONV_SIZE)[:, None] + channels[None, :], old, mask=is_old)
    for start in range(0, num_kept, ROW_TILE):
        later = start + tl.arange(0, ROW_TILE)
        source = first + later - HISTORY
        is_new = ((later < num_kept) & (source >= 0))[:, None] & is_channel[None, :]
        new = tl.load(of.raw + (source.to(tl.int64) * of.row_stride)[:, None] + channels[None, :], mask=is_new)
        tl.store(of.window + (later * CONV_SIZE)[:, None] + channels[None, :], new, mask=is_new)


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _delta_inputs(
    mixed_ptr: tl.tensor,
    log_decay_ptr: tl.tensor,
    strength_ptr: tl.tensor,
    windows_ptr: tl.tensor,
    projected_ptr: tl.tensor,
    conv_weight_ptr: tl.tensor,
    rate_ptr: tl.tensor,
    time_bias_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    committed_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HISTORY: tl.constexpr,
    HISTORY_TILE: tl.constexpr,
    IS_PROMPT: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> None:
    """Makes ROW_TILE rows of one head of one request; the programs after the last head make decay and strength.

    Only the first HISTORY rows read the window. They are in the first row tile, so that tile also writes it.
    """
    CONV_SIZE: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM
    NUM_HEADS: tl.constexpr = 2 * NUM_KEY_HEADS + NUM_VALUE_HEADS
    GATES: tl.constexpr = CONV_SIZE + NUM_VALUE_HEADS * VALUE_DIM
    head, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    out_rows = request * num_rows + rows
    if head == NUM_HEADS:
        heads = tl.arange(0, HEAD_TILE)
        is_head = heads < NUM_VALUE_HEADS
        is_entry = is_row[:, None] & is_head[None, :]
        # In each row the time steps follow the strengths.
        gate_ptrs = projected_ptr + GATES + (out_rows * row_stride)[:, None] + heads[None, :]
        strength = tl.load(gate_ptrs, mask=is_entry, other=0.0).to(tl.float32)
        time_step = tl.load(gate_ptrs + NUM_VALUE_HEADS, mask=is_entry, other=0.0).to(tl.float32)
        rate = tl.load(rate_ptr + heads, mask=is_head, other=0.0)[None, :]
        time_step += tl.load(time_bias_ptr + heads, mask=is_head, other=0.0)[None, :]
        softplus = tl.maximum(time_step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time_step)))
        out = (out_rows * NUM_VALUE_HEADS)[:, None] + heads[None, :]
        tl.store(log_decay_ptr + out, -rate * softplus, mask=is_entry)
        tl.store(strength_ptr + out, 1.0 / (1.0 + tl.exp(-strength)), mask=is_entry)
    else:
        is_value = head >= 2 * NUM_KEY_HEADS
        value_head = head - 2 * NUM_KEY_HEADS
        first_value = 2 * NUM_KEY_HEADS * KEY_DIM + value_head * VALUE_DIM
        own = tl.arange(0, CHANNEL_TILE)
        channels = tl.where(is_value, first_value, head * KEY_DIM) + own
        is_channel = own < tl.where(is_value, VALUE_DIM, KEY_DIM)
        slot, begin = tl.load(slot_ids_ptr + request), tl.load(committed_ptr + request)
        window_ptr = windows_ptr + slot * num_columns * CONV_SIZE
        of = Inputs(window_ptr, projected_ptr + request * num_rows * row_stride, begin, row_stride)
        total = _convolve(of, conv_weight_ptr, rows, is_row, channels, is_channel, CONV_SIZE, HISTORY)
        # The engines also round to the model's dtype here.
        mixed = (total / (1.0 + tl.exp(-total))).to(projected_ptr.dtype.element_ty).to(tl.float32)
        unit = tl.rsqrt(tl.sum(mixed * mixed, axis=1) + 1e-6)
        unit *= tl.where(head < NUM_KEY_HEADS, KEY_DIM**-0.5, 1.0)
        mixed *= tl.where(is_value, 1.0, unit)[:, None]
        out_ptrs = mixed_ptr + (out_rows * CONV_SIZE)[:, None] + channels[None, :]
        tl.store(out_ptrs, mixed, mask=is_row[:, None] & is_channel[None, :])
        if tl.program_id(1) == 0:
            _slide_window(of, num_rows, channels, is_channel, CONV_SIZE, HISTORY, HISTORY_TILE, IS_PROMPT, ROW_TILE)


@operator("delta_inputs", mutates_args=("windows",))
def delta_inputs(
    windows: torch.Tensor,
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    time_bias: torch.Tensor,
    slot_ids: torch.Tensor,
    committed: torch.Tensor,
    num_key_heads: int,
    key_head_dim: int,
    is_prompt: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn projected rows into the inputs of the rule, and update the convolution windows for later rows.

    Returns `mixed` [batch, num_rows, conv_size] float32: queries of unit length / sqrt(key_head_dim) and keys of unit
    length, of `num_key_heads` heads each, and values; and `log_decay` and `strength`, [batch, num_rows,
    num_value_heads] float32.

    Args:
        windows: [num_slots + 1, history + N - 1, conv_size] of the dtype of `projected`, written at `slot_ids`.
        projected: [batch, num_rows, conv_size + value_size + 2 * num_value_heads]: inputs of the convolution, the gate,
            strengths before the sigmoid, time steps.
        conv_weight: [conv_size, history + 1] float32.
        rate, time_bias: [num_value_heads] float32; log_decay is -rate * softplus(time step + time_bias).
        slot_ids, committed: [batch] int64; the inputs before row 0 are the `history` columns from `committed` on.
        is_prompt: all rows are committed, so the window begins with the last `history` inputs. Else column r + i is the
            i-th (from 0) of the inputs that precede row r + 1.
    """
    (batch, num_rows, _), conv_size = projected.shape, conv_weight.shape[0]
    num_value_heads, history = rate.shape[0], conv_weight.shape[1] - 1
    value_head_dim = (conv_size - 2 * num_key_heads * key_head_dim) // num_value_heads
    assert_whole((projected,), batch, num_rows, conv_size + num_value_heads * (value_head_dim + 2))
    assert_whole((windows,), *windows.shape[:2], conv_size)
    assert all(each.is_contiguous() for each in (conv_weight, rate, time_bias, slot_ids, committed))
    assert windows.dtype == projected.dtype and history <= _ROW_TILE
    assert is_prompt or windows.shape[1] >= history - 1 + num_rows
    mixed = conv_weight.new_empty(batch, num_rows, conv_size)
    log_decay, strength = conv_weight.new_empty(2, batch, num_rows, num_value_heads).unbind()
    with launch_on(projected):
        _delta_inputs[(2 * num_key_heads + num_value_heads + 1, triton.cdiv(num_rows, _ROW_TILE), batch)](
            mixed,
            log_decay,
            strength,
            windows,
            projected,
            conv_weight,
            rate,
            time_bias,
            slot_ids,
            committed,
            num_rows,
            windows.shape[1],
            projected.stride(1),
            IS_PROMPT=is_prompt,
            **_sizes(num_key_heads, num_value_heads, key_head_dim, value_head_dim, history),
        )
    return mixed, log_decay, strength


@cache
def _sizes(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, history: int) -> dict[str, int]:
    """Return the other compile-time constants; they are kept, since every layer asks for them."""
    return {
        "NUM_KEY_HEADS": num_key_heads,
        "NUM_VALUE_HEADS": num_value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHANNEL_TILE": triton.next_power_of_2(max(key_dim, value_dim)),
        "HEAD_TILE": triton.next_power_of_2(num_value_heads),
        "HISTORY": history,
        "HISTORY_TILE": triton.next_power_of_2(history),
        "ROW_TILE": _ROW_TILE,
    }
