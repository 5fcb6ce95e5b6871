"""Keeps the updates of a round's rows to the states of gated delta nets, so that the next round can replay them."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_KEPT_TILE = 1024


@triton.jit(do_not_specialize=["num_rows", "rows_kept"])
def _keep_rows(
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    kept_log_decay_ptr: tl.tensor,
    kept_strength_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    log_decay_ptr: tl.tensor,
    strength_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    rows_kept: tl.tensor,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Copies CHANNEL_TILE channels of the keys and values of one row; the first tile also copies decay and strength."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ids_ptr + row // num_rows)
    kept = slot * rows_kept + row % num_rows
    channels = tile * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)  # keys, then values, which follow the queries
    is_key, is_value = channels < KEY_SIZE, (channels >= KEY_SIZE) & (channels < KEY_SIZE + VALUE_SIZE)
    found = tl.load(mixed_ptr + row * (2 * KEY_SIZE + VALUE_SIZE) + KEY_SIZE + channels, mask=is_key | is_value)
    tl.store(keys_ptr + kept * KEY_SIZE + channels, found, mask=is_key)
    tl.store(values_ptr + kept * VALUE_SIZE + channels - KEY_SIZE, found, mask=is_value)
    heads = tl.arange(0, HEAD_TILE)
    is_head = (heads < NUM_VALUE_HEADS) & (tile == 0)
    source, place = row * NUM_VALUE_HEADS + heads, kept * NUM_VALUE_HEADS + heads
    tl.store(kept_log_decay_ptr + place, tl.load(log_decay_ptr + source, mask=is_head), mask=is_head)
    tl.store(kept_strength_ptr + place, tl.load(strength_ptr + source, mask=is_head), mask=is_head)


@operator("keep_delta_rows", mutates_args=("keys", "values", "kept_log_decay", "kept_strength"))
def keep_delta_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept_log_decay: torch.Tensor,
    kept_strength: torch.Tensor,
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    slot_ids: torch.Tensor,
) -> None:
    """Keep rows for the next `delta_replay`; the arguments are those of `delta_replay`, and the first four are written
    at `slot_ids`.

    This is a separate launch after `delta_replay`, whose programs read the old rows that this one overwrites.
    """
    batch, num_rows, num_value_heads = log_decay.shape
    key_size, value_size = keys[0, 0].numel(), values[0, 0].numel()
    assert_rows_of(mixed, batch, num_rows, 2 * key_size + value_size)
    assert_rows_of(slot_ids, batch)
    assert num_rows <= keys.shape[1]
    everything = (keys, values, kept_log_decay, kept_strength, mixed, log_decay, strength, slot_ids)
    assert all(tensor.is_contiguous() for tensor in everything)
    with launch_on(keys):
        _keep_rows[(batch * num_rows, triton.cdiv(key_size + value_size, _KEPT_TILE))](
            keys,
            values,
            kept_log_decay,
            kept_strength,
            mixed,
            log_decay,
            strength,
            slot_ids,
            num_rows,
            keys.shape[1],
            KEY_SIZE=key_size,
            VALUE_SIZE=value_size,
            NUM_VALUE_HEADS=num_value_heads,
            HEAD_TILE=triton.next_power_of_2(num_value_heads),
            CHANNEL_TILE=_KEPT_TILE,
        )
