"""Products of a few rows with a matrix for each head, and the rotation of the remaining channels.

Latent attention uses them to map query heads into the space of the cache, and attended latent numbers to values.

Source: the absorbed form of DeepSeek-V2 (arXiv 2405.04434).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_kernels.early import loads_ahead, placed, wait_behind_others
from spec_kernels.latent_rows import Latents, write_row
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, assert_whole, launch_on

MAX_HEAD_ROWS = 16
"""The number of rows in a tile, and the most rows; a row's bits do not depend on the others."""

_COLUMNS = 64


class Heads(NamedTuple):
    """Pointers to what a product of heads writes and reads."""

    out: tl.tensor
    heads: tl.tensor
    maps: tl.tensor
    cos: tl.tensor
    signed_sin: tl.tensor


class Strides(NamedTuple):
    """Strides of rows and heads: of the outputs, of the inputs, and of the angles."""

    out_row: tl.tensor
    out_head: tl.tensor
    row: tl.tensor
    head: tl.tensor
    turn: tl.tensor


class Sizes(NamedTuple):
    """Channels of a head before and after the product, half of the rotated ones, and the tile of a program."""

    IN: tl.constexpr
    OUT: tl.constexpr
    HALF: tl.constexpr
    HALF_TILE: tl.constexpr
    ROW_TILE: tl.constexpr
    COLUMN_TILE: tl.constexpr
    CHANNEL_TILE: tl.constexpr


@triton.jit
def _turn(
    out_ptrs: tl.tensor,
    head_ptrs: tl.tensor,
    cos_ptrs: tl.tensor,
    signed_sin_ptrs: tl.tensor,
    is_row: tl.tensor,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Rotates the channels [rows, 2 * HALF] of one head."""
    half = tl.arange(0, HALF_TILE)[None, :]
    is_there = is_row[:, None] & (half < HALF)
    first = tl.load(head_ptrs[:, None] + half, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(head_ptrs[:, None] + half + HALF, mask=is_there, other=0.0).to(tl.float32)
    first_cos = tl.load(cos_ptrs[:, None] + half, mask=is_there, other=0.0).to(tl.float32)
    second_cos = tl.load(cos_ptrs[:, None] + half + HALF, mask=is_there, other=0.0).to(tl.float32)
    first_sin = tl.load(signed_sin_ptrs[:, None] + half, mask=is_there, other=0.0).to(tl.float32)
    second_sin = tl.load(signed_sin_ptrs[:, None] + half + HALF, mask=is_there, other=0.0).to(tl.float32)
    out = first * first_cos + second * first_sin
    tl.store(out_ptrs[:, None] + half, out.to(out_ptrs.dtype.element_ty), mask=is_there)
    out = second * second_cos + first * second_sin
    tl.store(out_ptrs[:, None] + half + HALF, out.to(out_ptrs.dtype.element_ty), mask=is_there)


@triton.jit
def _load_parts(
    head_ptrs: tl.tensor, channels: tl.tensor, is_row: tl.tensor, IN: tl.constexpr, CHANNEL_TILE: tl.constexpr
) -> tl.tensor:
    """Load some channels of one head for all rows."""
    is_channel = (channels < IN) | (IN % CHANNEL_TILE == 0)
    is_there = is_row[:, None] & is_channel[None, :]
    return tl.load(head_ptrs[:, None] + channels[None, :], mask=is_there, other=0.0)


@triton.jit
def _load_map(
    map_ptrs: tl.tensor, channels: tl.tensor, is_column: tl.tensor, IN: tl.constexpr, CHANNEL_TILE: tl.constexpr
) -> tl.tensor:
    """Load the rows of a head's matrix for these channels."""
    is_channel = (channels < IN) | (IN % CHANNEL_TILE == 0)
    return tl.load(map_ptrs, mask=is_channel[:, None] & is_column[None, :], other=0.0)


@triton.jit
def _multiply_head(
    of: Heads, num_rows: tl.tensor, strides: Strides, sizes: Sizes, AHEAD: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Multiplies one head of all rows by some columns of its matrix. A head's first program rotates the other
    channels."""
    IN: tl.constexpr = sizes.IN
    OUT: tl.constexpr = sizes.OUT
    HALF: tl.constexpr = sizes.HALF
    CHANNEL_TILE: tl.constexpr = sizes.CHANNEL_TILE
    head = tl.program_id(1)
    rows = tl.arange(0, sizes.ROW_TILE)
    is_row = rows < num_rows
    columns = tl.program_id(0) * sizes.COLUMN_TILE + tl.arange(0, sizes.COLUMN_TILE)
    is_column = (columns < OUT) | (OUT % sizes.COLUMN_TILE == 0)
    all_channels = tl.arange(0, CHANNEL_TILE)
    head_ptrs = of.heads + rows * strides.row + head * strides.head
    out_ptrs = of.out + rows * strides.out_row + head * strides.out_head
    map_ptrs = of.maps + (head.to(tl.int64) * IN + all_channels)[:, None] * OUT + columns[None, :]
    acc = tl.zeros((sizes.ROW_TILE, sizes.COLUMN_TILE), tl.float32)
    if AHEAD:
        # No kernel writes the maps, so they are loaded while the previous kernel still runs.
        STEPS: tl.constexpr = (IN + CHANNEL_TILE - 1) // CHANNEL_TILE
        tiles = (_load_map(map_ptrs, all_channels, is_column, IN, CHANNEL_TILE),)
        for step in tl.static_range(1, STEPS):
            channels = step * CHANNEL_TILE + all_channels
            tiles += (_load_map(map_ptrs + step * (CHANNEL_TILE * OUT), channels, is_column, IN, CHANNEL_TILE),)  # type: ignore[assignment]
        wait_behind_others(EARLY)
        for step in tl.static_range(STEPS):
            parts = _load_parts(head_ptrs, step * CHANNEL_TILE + all_channels, is_row, IN, CHANNEL_TILE)
            acc = tl.dot(parts, tiles[step], acc, input_precision="ieee")
    else:
        wait_behind_others(EARLY)
        for channel in range(0, IN, CHANNEL_TILE):
            parts = _load_parts(head_ptrs, channel + all_channels, is_row, IN, CHANNEL_TILE)
            tile = _load_map(map_ptrs + channel * OUT, channel + all_channels, is_column, IN, CHANNEL_TILE)
            acc = tl.dot(parts, tile, acc, input_precision="ieee")
    is_entry = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs[:, None] + columns[None, :], acc.to(of.out.dtype.element_ty), mask=is_entry)
    # The outer branch is taken at compile time.
    if HALF > 0:  # noqa: SIM102
        if tl.program_id(0) == 0:
            cos, sin = of.cos + rows * strides.turn, of.signed_sin + rows * strides.turn
            _turn(out_ptrs + OUT, head_ptrs + IN, cos, sin, is_row, HALF, sizes.HALF_TILE)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_heads(
    out_ptr: tl.tensor,
    heads_ptr: tl.tensor,
    maps_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    signed_sin_ptr: tl.tensor,
    num_rows: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    turn_stride: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Multiplies one head of all rows by some columns of its matrix."""
    of = Heads(out_ptr, heads_ptr, maps_ptr, cos_ptr, signed_sin_ptr)
    strides = Strides(out_row_stride, out_head_stride, row_stride, head_stride, turn_stride)
    _multiply_head(
        of, num_rows, strides, Sizes(IN, OUT, HALF, HALF_TILE, ROW_TILE, COLUMN_TILE, CHANNEL_TILE), AHEAD, EARLY
    )


@triton.jit(do_not_specialize=["num_rows"])
def _absorb_and_write(
    out_ptr: tl.tensor,
    heads_ptr: tl.tensor,
    maps_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    signed_sin_ptr: tl.tensor,
    num_rows: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    turn_stride: tl.tensor,
    cache_ptr: tl.tensor,
    projected_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    eps: tl.tensor,
    projected_stride: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Multiplies one head of all rows by some columns of its matrix. Programs after the last head write cache rows."""
    if tl.program_id(1) == tl.num_programs(1) - 1:
        wait_behind_others(EARLY)
        latents = Latents(cache_ptr, projected_ptr, norm_weight_ptr, cos_ptr, signed_sin_ptr, slot_mapping_ptr)
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            write_row(latents, row, eps, projected_stride, turn_stride, OUT, HALF, RANK_TILE, HALF_TILE)
    else:
        of = Heads(out_ptr, heads_ptr, maps_ptr, cos_ptr, signed_sin_ptr)
        strides = Strides(out_row_stride, out_head_stride, row_stride, head_stride, turn_stride)
        _multiply_head(
            of, num_rows, strides, Sizes(IN, OUT, HALF, HALF_TILE, ROW_TILE, COLUMN_TILE, CHANNEL_TILE), AHEAD, EARLY
        )


@operator("multiply_heads")
def multiply_heads(
    heads: torch.Tensor,
    maps: torch.Tensor,
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply each head of up to 16 rows by that head's matrix, and rotate further channels if there are any. Returns
    [rows, num_heads, out_width (+ rotated)].

    Args:
        heads: [rows, num_heads, in_width (+ rotated)].
        maps: [num_heads, in_width, out_width], contiguous.
        cos: [rows, rotated]; None if no channels are rotated. `signed_sin` likewise, negated in its first half.
    """
    num_rows, num_heads, _ = heads.shape
    _, in_width, out_width = maps.shape
    rotated = 0 if cos is None else cos.shape[1]
    assert 0 < num_rows <= MAX_HEAD_ROWS and (cos is None) == (signed_sin is None)
    assert_rows_of(heads, num_rows, num_heads, in_width + rotated)
    assert_rows_of(maps, num_heads, in_width, out_width)
    assert maps.is_contiguous() and heads.dtype == maps.dtype
    if cos is not None and signed_sin is not None:
        assert_rows_of(cos, num_rows, rotated)
        assert cos.stride() == signed_sin.stride() and signed_sin.shape == cos.shape
    out = heads.new_empty(num_rows, num_heads, out_width + rotated)
    with launch_on(heads):
        _multiply_heads[(triton.cdiv(out_width, _COLUMNS), num_heads)](
            out,
            heads,
            maps,
            heads if cos is None else cos,
            heads if signed_sin is None else signed_sin,
            num_rows,
            out.stride(0),
            out.stride(1),
            heads.stride(0),
            heads.stride(1),
            0 if cos is None else cos.stride(0),
            AHEAD=loads_ahead(),
            **placed(True),
            **_sizes(in_width, out_width, rotated),
        )
    return out


@cache
def _sizes(in_width: int, out_width: int, rotated: int) -> dict[str, int]:
    """Return compile-time constants of both launches, and their stages; they are kept, since every layer asks for
    them."""
    return {
        "IN": in_width,
        "OUT": out_width,
        "HALF": rotated // 2,
        "HALF_TILE": triton.next_power_of_2(max(1, rotated // 2)),
        "ROW_TILE": MAX_HEAD_ROWS,
        "COLUMN_TILE": _COLUMNS,
        "CHANNEL_TILE": 64 if in_width % 128 else 128,
        "num_stages": 4,
    }


@operator("absorb_and_write", mutates_args=("cache",))
def absorb_and_write(
    heads: torch.Tensor,
    maps: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    cache: torch.Tensor,
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Do `multiply_heads` with rotation, and `write_latents` for the same rows, in one launch before latent attention.

    Args:
        heads: this and the arguments to `signed_sin` are as in `multiply_heads`, and so is what is returned.
        cache: [num_slots, row_width], written; this and the following arguments are as in `write_latents`.
    """
    num_rows, num_heads, query_width = heads.shape
    _, in_width, rank = maps.shape
    rotated = cos.shape[1]
    assert 0 < num_rows <= MAX_HEAD_ROWS and query_width == in_width + rotated and maps.is_contiguous()
    assert_rows_of(projected, num_rows, rank + rotated)
    assert_whole((cache,), cache.shape[0], rank + rotated)
    assert_rows_of(norm_weight, rank)
    assert cos.stride() == signed_sin.stride() and heads.stride(2) == 1 and slot_mapping.shape == (num_rows,)
    assert heads.dtype == maps.dtype
    queries = heads.new_empty(num_rows, num_heads, rank + rotated)
    with launch_on(heads):
        _absorb_and_write[(triton.cdiv(rank, _COLUMNS), num_heads + 1)](
            queries,
            heads,
            maps,
            cos,
            signed_sin,
            num_rows,
            queries.stride(0),
            queries.stride(1),
            heads.stride(0),
            heads.stride(1),
            cos.stride(0),
            cache,
            projected,
            norm_weight,
            slot_mapping,
            eps,
            projected.stride(0),
            RANK_TILE=triton.next_power_of_2(rank),
            AHEAD=loads_ahead(),
            **placed(True),
            **_sizes(in_width, rank, rotated),
        )
    return queries
