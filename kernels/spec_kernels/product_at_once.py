"""Products with small weights: a program loads its whole part of the weight before it waits, and its warps divide the
inputs among themselves.

The time of such a product is its launch and its steps, each of which waits for the one before. So each warp takes one
group of the inputs. If kernels start early (`early.py`), the weight is loaded while the previous kernel still runs.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.early import wait_for_inputs
from spec_kernels.product_loads import Operands, ProductForm, Tiling, load_norm, load_rows, load_weight


@triton.jit
def in_groups(tile: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """Divide the inputs of a tile [rows, inputs] into GROUPS groups: [groups, rows, inputs / groups]."""
    return tl.permute(tl.reshape(tile, (tile.shape[0], GROUPS, tile.shape[1] // GROUPS)), (1, 0, 2))


@triton.jit
def multiply_groups(rows: tl.tensor, weight: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """Add the product of row groups [groups, rows, inputs] and the same groups of a weight [columns, inputs] to float32
    sums [groups, rows, columns].

    Each of the four warps has one group, and so takes a quarter of the steps. The steps of a warp wait for one another.
    """
    groups = tl.permute(in_groups(weight, rows.shape[0]), (0, 2, 1))
    return tl.dot(rows, groups, sums, input_precision="ieee")


@triton.jit
def sums_at_once(
    operands: Operands,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
    tiling: Tiling,
    form: ProductForm,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Compute a tile of outputs [rows, column] with a small weight. All inputs are loaded without a loop, in two parts:
    DEPTH of them, and the REST.

    Returns the sums; if gated, those of the other half of the outputs; if normed, the sum of each row's squares.
    """
    IN_FEATURES: tl.constexpr = tiling.IN_FEATURES
    WHOLE_TILES: tl.constexpr = tiling.WHOLE_TILES
    row, first = tl.arange(0, tiling.ROW_TILE), tl.arange(0, tiling.DEPTH)
    weight = load_weight(operands.weight, column, first, out_features, IN_FEATURES, WHOLE_TILES)
    up_ptr = operands.weight + out_features * IN_FEATURES
    if form.GATED:
        up_weight = load_weight(up_ptr, column, first, out_features, IN_FEATURES, WHOLE_TILES)
    if form.NORMED:
        norm = load_norm(operands.norm, first, IN_FEATURES)
    if tiling.REST > 0:
        last = tiling.DEPTH + tl.arange(0, tiling.REST)
        last_weight = load_weight(operands.weight, column, last, out_features, IN_FEATURES, WHOLE_TILES)
        if form.GATED:
            last_up_weight = load_weight(up_ptr, column, last, out_features, IN_FEATURES, WHOLE_TILES)
        if form.NORMED:
            last_norm = load_norm(operands.norm, last, IN_FEATURES)
    wait_for_inputs(form.EARLY)
    sums = tl.zeros((tiling.GROUPS, tiling.ROW_TILE, column.shape[0]), tl.float32)
    up_sums = sums
    square_sum = tl.zeros((tiling.ROW_TILE,), tl.float32)
    rows = load_rows(operands.rows, row, first, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES)
    if tiling.REST > 0:
        last_rows = load_rows(operands.rows, row, last, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES)
    if form.NORMED:
        wide = rows.to(tl.float32)
        square_sum = tl.sum(wide * wide, 1)
        rows = (wide * norm[None, :]).to(rows.dtype)
        if tiling.REST > 0:
            last_wide = last_rows.to(tl.float32)
            square_sum += tl.sum(last_wide * last_wide, 1)
            last_rows = (last_wide * last_norm[None, :]).to(rows.dtype)
    groups = in_groups(rows, tiling.GROUPS)
    sums = multiply_groups(groups, weight, sums)
    if form.GATED:
        up_sums = multiply_groups(groups, up_weight, up_sums)
    if tiling.REST > 0:
        last_groups = in_groups(last_rows, tiling.GROUPS)
        sums = multiply_groups(last_groups, last_weight, sums)
        if form.GATED:
            up_sums = multiply_groups(last_groups, last_up_weight, up_sums)
    return tl.sum(sums, 0), tl.sum(up_sums, 0), square_sum
