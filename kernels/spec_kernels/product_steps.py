"""Programs of a product do this in each step of their loop over the inputs: load, widen, multiply."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.block_fp8 import BLOCK, load_scale, multiplier, widened


@triton.jit
def load_weight(
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tensor:
    """Load a tile of a weight [columns, inputs], which is read once: it need not stay in L2."""
    at = weight_ptr + columns.to(tl.int64)[:, None] * IN_FEATURES + inputs[None, :]
    if WHOLE_TILES:
        weight = tl.load(at, eviction_policy="evict_first")
    else:
        inside = (columns < out_features)[:, None] & (inputs < IN_FEATURES)[None, :]
        weight = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return weight


@triton.jit
def load_rows(
    rows_ptr: tl.tensor,
    row: tl.tensor,
    inputs: tl.tensor,
    num_rows: tl.tensor,
    rows_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tensor:
    """Load a tile of the rows [row, inputs], zeros past the last one."""
    at = rows_ptr + row[:, None] * rows_stride + inputs[None, :]
    if WHOLE_TILES:
        rows = tl.load(at, mask=(row < num_rows)[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=(row < num_rows)[:, None] & (inputs < IN_FEATURES)[None, :], other=0.0)
    return rows


@triton.jit
def load_norm(norm_ptr: tl.tensor, inputs: tl.tensor, IN_FEATURES: tl.constexpr) -> tl.tensor:
    """Load some of a norm's weights, which multiply the rows; what the norm divides by is known when all inputs have
    been seen. They are asked for a step before their use: the compiler does that for operands of products alone."""
    return tl.load(norm_ptr + inputs, mask=inputs < IN_FEATURES, other=0.0)


@triton.jit
def multiply(rows: tl.tensor, weight: tl.tensor, sums: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    """Add the product of two tiles to float32 sums [rows, columns], or turned ones. float32 is exact (no TF32)."""
    if TURNED:
        sums = tl.dot(weight, tl.trans(rows), sums, input_precision="ieee")
    else:
        sums = tl.dot(rows, tl.trans(weight), sums, input_precision="ieee")
    return sums


@triton.jit
def add_product(
    sums: tl.tensor,
    rows: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    first_input: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:
    """Add to `sums` the product of rows with the rows `first + columns` of a weight, in a step of inputs.

    A step of a weight in e4m3 is a block, whose sums are scaled before they join the others.
    """
    if SCALE_ROWS == 0:
        weight_ptr += first.to(tl.int64) * IN_FEATURES
        inputs = first_input + tl.arange(0, DEPTH)
        weight = load_weight(weight_ptr, columns, inputs, out_features, IN_FEATURES, WHOLE_TILES)
        sums = multiply(rows, weight, sums, TURNED)
    else:
        WIDTH: tl.constexpr = (IN_FEATURES + BLOCK - 1) // BLOCK * (BLOCK // 2)
        block = first_input // BLOCK
        pairs = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        weight_ptr += first.to(tl.int64) * WIDTH
        weight = load_weight(weight_ptr, columns, pairs, out_features, WIDTH, WHOLE_TILES)
        of_block = multiply(rows, widened(weight, rows.dtype), tl.zeros(sums.shape, tl.float32), TURNED)
        scale = load_scale(
            *(scales_ptr, first, columns, block, out_features),
            IN_FEATURES=IN_FEATURES,
            SCALE_ROWS=SCALE_ROWS,
            COLUMN_TILE=COLUMN_TILE,
            WHOLE_TILES=WHOLE_TILES,
            TURNED=TURNED,
        )
        sums += of_block * multiplier(rows.dtype) * scale
    return sums
