"""What the parts of a product pass on to each other, and loads of its tiles of a weight, of rows and of a norm."""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Operands(NamedTuple):
    """Pointers to what a product reads, to the partial sums of its splits, and to the counters of finished splits."""

    rows: tl.tensor
    weight: tl.tensor
    scales: tl.tensor
    norm: tl.tensor
    partial: tl.tensor
    arrivals: tl.tensor


class Tiling(NamedTuple):
    """The division of a product among programs, as in `product_tiles.SkinnyTiles`."""

    IN_FEATURES: tl.constexpr
    SPLITS: tl.constexpr
    GROUPS: tl.constexpr
    ROW_TILE: tl.constexpr
    COLUMN_TILE: tl.constexpr
    DEPTH: tl.constexpr
    REST: tl.constexpr
    STAGES: tl.constexpr
    TURNED: tl.constexpr
    WHOLE_TILES: tl.constexpr


class ProductForm(NamedTuple):
    """What a product computes, and when its program loads and waits.

    SCALED is 0 without scales. For an e4m3 weight it is how many of its rows share one; for 4 bits, less than 0, how
    many inputs do.
    """

    SCALED: tl.constexpr
    NORMED: tl.constexpr
    GATED: tl.constexpr
    AHEAD: tl.constexpr
    EARLY: tl.constexpr


@triton.jit
def load_weight(
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tensor:
    """Load a tile of a weight [columns, inputs]. It is read only once, so it need not stay in L2."""
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
    """Load a tile of the rows [row, inputs], with zeros past the last row and the last input."""
    at = rows_ptr + row[:, None] * rows_stride + inputs[None, :]
    if WHOLE_TILES:
        rows = tl.load(at, mask=(row < num_rows)[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=(row < num_rows)[:, None] & (inputs < IN_FEATURES)[None, :], other=0.0)
    return rows


@triton.jit
def load_norm(norm_ptr: tl.tensor, inputs: tl.tensor, IN_FEATURES: tl.constexpr) -> tl.tensor:
    """Load some of a norm's weights, which multiply the rows. The norm's divisor is only known after all inputs.

    Loops over steps call this one step ahead, since the compiler prefetches only operands of products.
    """
    return tl.load(norm_ptr + inputs, mask=inputs < IN_FEATURES, other=0.0)


@triton.jit
def load_weights(
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tuple:
    """Load the weight tiles of several steps by `load_weight`."""
    inputs = first + tl.arange(0, DEPTH)
    tiles = (load_weight(weight_ptr, columns, inputs, out_features, IN_FEATURES, WHOLE_TILES),)
    for step in tl.static_range(1, STEPS):
        tiles += (load_weight(weight_ptr, columns, inputs + step * DEPTH, out_features, IN_FEATURES, WHOLE_TILES),)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_steps(
    rows_ptr: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    rows_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tuple:
    """Load the rows of several steps by `load_rows`."""
    inputs = first + tl.arange(0, DEPTH)
    tiles = (load_rows(rows_ptr, row, inputs, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES),)
    for step in tl.static_range(1, STEPS):
        tiles += (load_rows(rows_ptr, row, inputs + step * DEPTH, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES),)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_norms(
    norm_ptr: tl.tensor, first: tl.tensor, IN_FEATURES: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr
) -> tl.tuple:
    """Load the norm's weights of several steps by `load_norm`."""
    inputs = first + tl.arange(0, DEPTH)
    parts = (load_norm(norm_ptr, inputs, IN_FEATURES),)
    for step in tl.static_range(1, STEPS):
        parts += (load_norm(norm_ptr, inputs + step * DEPTH, IN_FEATURES),)  # type: ignore[assignment]
    return parts
