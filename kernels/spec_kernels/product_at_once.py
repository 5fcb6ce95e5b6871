"""Products with small weights: a program loads its whole part of the weight before it waits, and its warps share the
inputs.

The time of such a product is its launch and its steps, each of which waits for the one before. So its weight is loaded
while the previous kernel still runs (`early.py`), and the inputs are divided into groups, one for each warp.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.early import wait_for_inputs
from spec_kernels.product_loads import load_norm, load_rows, load_weight


@triton.jit
def in_groups(tile: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """Divide the inputs of a tile [rows, inputs] into GROUPS groups: [groups, rows, inputs / groups]."""
    return tl.permute(tl.reshape(tile, (tile.shape[0], GROUPS, tile.shape[1] // GROUPS)), (1, 0, 2))


@triton.jit
def multiply_groups(rows: tl.tensor, weight: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """Add the product of row groups [groups, rows, inputs] and the same groups of a weight [columns, inputs] to float32
    sums [groups, rows, columns].

    Each warp has one group, and so only a quarter of the steps, which wait for one another.
    """
    groups = tl.permute(in_groups(weight, rows.shape[0]), (0, 2, 1))
    return tl.dot(rows, groups, sums, input_precision="ieee")


@triton.jit
def sums_at_once(
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    REST: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Compute a tile of outputs [rows, column] with a small weight, from all inputs at once: DEPTH, then REST of them.

    Returns the sums; if gated, those of the other half of the outputs; if normed, the sum of each row's squares.
    """
    row = tl.arange(0, ROW_TILE)
    first = tl.arange(0, DEPTH)
    weight = load_weight(weight_ptr, column, first, out_features, IN_FEATURES, WHOLE_TILES)
    up_ptr = weight_ptr + out_features * IN_FEATURES
    if GATED:
        up_weight = load_weight(up_ptr, column, first, out_features, IN_FEATURES, WHOLE_TILES)
    if NORMED:
        norm = load_norm(norm_ptr, first, IN_FEATURES)
    if REST > 0:
        last = DEPTH + tl.arange(0, REST)
        last_weight = load_weight(weight_ptr, column, last, out_features, IN_FEATURES, WHOLE_TILES)
        if GATED:
            last_up_weight = load_weight(up_ptr, column, last, out_features, IN_FEATURES, WHOLE_TILES)
        if NORMED:
            last_norm = load_norm(norm_ptr, last, IN_FEATURES)
    wait_for_inputs(EARLY)
    sums = tl.zeros((GROUPS, ROW_TILE, column.shape[0]), tl.float32)
    up_sums = tl.zeros((GROUPS, ROW_TILE, column.shape[0]), tl.float32)
    square_sum = tl.zeros((ROW_TILE,), tl.float32)
    rows = load_rows(rows_ptr, row, first, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES)
    if REST > 0:
        last_rows = load_rows(rows_ptr, row, last, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES)
    if NORMED:
        wide = rows.to(tl.float32)
        square_sum = tl.sum(wide * wide, 1)
        rows = (wide * norm[None, :]).to(rows.dtype)
        if REST > 0:
            last_wide = last_rows.to(tl.float32)
            square_sum += tl.sum(last_wide * last_wide, 1)
            last_rows = (last_wide * last_norm[None, :]).to(rows.dtype)
    groups = in_groups(rows, GROUPS)
    sums = multiply_groups(groups, weight, sums)
    if GATED:
        up_sums = multiply_groups(groups, up_weight, up_sums)
    if REST > 0:
        last_groups = in_groups(last_rows, GROUPS)
        sums = multiply_groups(last_groups, last_weight, sums)
        if GATED:
            up_sums = multiply_groups(last_groups, last_up_weight, up_sums)
    return tl.sum(sums, 0), tl.sum(up_sums, 0), square_sum
