"""The steps of programs of `few_experts.py`: finding their rows, multiplying a tile, and adding terms."""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from spec_kernels.gate import activate

MOST_LOOKS: tl.constexpr = tl.constexpr(1 << 25)
"""The most times that a program checks whether others are done. Together all these checks take half a minute; the other
programs need microseconds."""


@triton.jit
def wait_until_ready(ready_ptr: tl.tensor, NUM_TILES: tl.constexpr) -> None:
    """Waits until other programs have finished NUM_TILES tiles.

    CUDA promises no order of programs. If a program waits for others that never start, it ends the launch with an error
    instead of blocking the GPU forever.
    """
    num_ready = tl.atomic_add(ready_ptr, 0, sem="acquire")
    num_looks = 0
    while (num_ready < NUM_TILES) & (num_looks < MOST_LOOKS):
        num_ready = tl.atomic_add(ready_ptr, 0, sem="acquire")
        num_looks += 1
    if num_ready < NUM_TILES:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def rows_of_slot(
    expert_ids_ptr: tl.tensor,
    slot: tl.tensor,
    num_rows: tl.tensor,
    ROW_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOICE_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the expert of a slot, the rows that chose it, the pair of each, and whether this slot does the expert's
    work.

    The slot after those of all pairs is the shared expert's, which all rows choose; its expert is given as 0.
    """
    rows = tl.arange(0, ROW_TILE)
    choices = tl.arange(0, CHOICE_TILE)
    places = rows[:, None] * NUM_CHOSEN + choices[None, :]
    is_there = (rows < num_rows)[:, None] & (choices < NUM_CHOSEN)[None, :]
    num_pairs = num_rows * NUM_CHOSEN
    is_shared = slot == num_pairs
    expert = tl.load(expert_ids_ptr + slot, mask=slot < num_pairs, other=0)
    is_it = is_there & (tl.load(expert_ids_ptr + places, mask=is_there, other=-1) == expert)
    is_row = tl.max(is_it.to(tl.int32), 1) > 0
    first_row = tl.min(tl.where(is_row, rows, ROW_TILE), 0)
    pairs = tl.sum(tl.where(is_it, places, 0), 1)
    is_row = tl.where(is_shared, rows < num_rows, is_row)
    pairs = tl.where(is_shared, num_pairs + rows, pairs)
    return expert, is_row, pairs, is_shared | (first_row == slot // NUM_CHOSEN)


class Tile(NamedTuple):
    """The sizes of an expert and of a program's tile of one of its products."""

    ROW_TILE: tl.constexpr
    HIDDEN: tl.constexpr
    INNER: tl.constexpr
    COLUMN_TILE: tl.constexpr
    CHANNEL_TILE: tl.constexpr
    STAGES: tl.constexpr


@triton.jit
def gate_up_of_tile(
    inner_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    tile: tl.tensor,
    is_row: tl.tensor,
    pairs: tl.tensor,
    row_stride: tl.tensor,
    size: Tile,
    IS_GELU: tl.constexpr,
) -> None:
    """Computes activation(gate) * up for some columns of one expert and all rows that chose it."""
    HIDDEN: tl.constexpr = size.HIDDEN
    CHANNEL_TILE: tl.constexpr = size.CHANNEL_TILE
    columns = tile * size.COLUMN_TILE + tl.arange(0, size.COLUMN_TILE)
    is_column = (columns < size.INNER) | (size.INNER % size.COLUMN_TILE == 0)
    all_channels = tl.arange(0, CHANNEL_TILE)
    all_rows = tl.arange(0, size.ROW_TILE)
    gate_ptrs = weights_ptr + columns[:, None] * HIDDEN + all_channels[None, :]
    row_ptrs = rows_ptr + all_rows[:, None] * row_stride + all_channels[None, :]
    gate = tl.zeros((size.ROW_TILE, size.COLUMN_TILE), tl.float32)
    up = tl.zeros((size.ROW_TILE, size.COLUMN_TILE), tl.float32)
    for channel in tl.range(0, HIDDEN, CHANNEL_TILE, num_stages=size.STAGES):
        is_channel = ((channel + all_channels < HIDDEN) | (HIDDEN % CHANNEL_TILE == 0))[None, :]
        is_weight = is_column[:, None] & is_channel
        rows = tl.load(row_ptrs + channel, mask=is_row[:, None] & is_channel, other=0.0)
        gate_rows = tl.load(gate_ptrs + channel, mask=is_weight, other=0.0)
        up_rows = tl.load(gate_ptrs + size.INNER * HIDDEN + channel, mask=is_weight, other=0.0)
        gate = tl.dot(rows, tl.trans(gate_rows), gate, input_precision="ieee")
        up = tl.dot(rows, tl.trans(up_rows), up, input_precision="ieee")
    inner = activate(gate, IS_GELU) * up
    inner_ptrs = inner_ptr + pairs[:, None] * size.INNER + columns[None, :]
    tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def down_of_tile(
    terms_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    is_row: tl.tensor,
    pairs: tl.tensor,
    num_pairs: tl.tensor,
    size: Tile,
) -> None:
    """Computes some columns of one expert's outputs times the routing weights, which are 1 for the shared expert."""
    INNER: tl.constexpr = size.INNER
    CHANNEL_TILE: tl.constexpr = size.CHANNEL_TILE
    all_channels = tl.arange(0, CHANNEL_TILE)
    weight_ptrs = weights_ptr + columns[:, None] * INNER + all_channels[None, :]
    inner_ptrs = inner_ptr + pairs[:, None] * INNER + all_channels[None, :]
    acc = tl.zeros((size.ROW_TILE, size.COLUMN_TILE), tl.float32)
    for channel in tl.range(0, INNER, CHANNEL_TILE, num_stages=size.STAGES):
        is_channel = ((channel + all_channels < INNER) | (INNER % CHANNEL_TILE == 0))[None, :]
        is_inner = is_row[:, None] & is_channel
        inner = tl.load(inner_ptrs + channel, mask=is_inner, other=0.0, cache_modifier=".cg")
        weight_rows = tl.load(weight_ptrs + channel, mask=is_column[:, None] & is_channel, other=0.0)
        acc = tl.dot(inner, tl.trans(weight_rows), acc, input_precision="ieee")
    weights = tl.load(routing_weights_ptr + pairs, mask=is_row & (pairs < num_pairs), other=0.0)
    acc *= tl.where(pairs < num_pairs, weights, 1.0)[:, None]
    term_ptrs = terms_ptr + pairs[:, None] * size.HIDDEN + columns[None, :]
    tl.store(term_ptrs, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_terms_of_tile(
    out_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    num_rows: tl.tensor,
    residual_stride: tl.tensor,
    ROW_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Adds the terms of all rows in some columns, in the order in which their experts were chosen, then shared expert
    and residual."""
    rows = tl.arange(0, ROW_TILE)
    is_entry = (rows < num_rows)[:, None] & is_column[None, :]
    total = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        term_ptrs = terms_ptr + (rows * NUM_CHOSEN + choice)[:, None] * HIDDEN + columns[None, :]
        total += tl.load(term_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg")
    if HAS_SHARED:
        term_ptrs = terms_ptr + (num_rows * NUM_CHOSEN + rows)[:, None] * HIDDEN + columns[None, :]
        total += tl.load(term_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg")
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
        total += tl.load(residual_ptrs, mask=is_entry, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * HIDDEN + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_entry)
