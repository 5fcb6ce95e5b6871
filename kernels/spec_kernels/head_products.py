"""Products of a few rows with a matrix for each head, and the rotation of the remaining channels.

Latent attention uses them to map query heads into the space of the cache, and attended latent numbers to values.

Source: the absorbed form of DeepSeek-V2 (arXiv 2405.04434).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from functools import cache

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
def _sums_of_head(
    head_ptrs: tl.tensor,
    map_ptrs: tl.tensor,
    is_row: tl.tensor,
    is_column: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> tl.tensor:
    """Multiply one head of all rows by some columns of its matrix."""
    all_channels = tl.arange(0, CHANNEL_TILE)
    acc = tl.zeros((is_row.shape[0], is_column.shape[0]), tl.float32)
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
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_heads(
    out_ptr: tl.tensor,
    heads_ptr: tl.tensor,
    maps_ptr: tl.tensor,
    cos_ptr: tl.tensor | None,
    signed_sin_ptr: tl.tensor | None,
    cache_ptr: tl.tensor | None,
    projected_ptr: tl.tensor | None,
    norm_weight_ptr: tl.tensor | None,
    slot_mapping_ptr: tl.tensor | None,
    num_rows: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    turn_stride: tl.tensor,
    projected_stride: tl.tensor,
    eps: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OUT_TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Multiplies one head of all rows by some columns of its matrix. A head's first program rotates the other channels.
    With a cache, programs after the last head write its rows."""
    head = tl.program_id(1)
    # The outer branches are taken at compile time.
    if cache_ptr is not None:  # noqa: SIM102
        if head == tl.num_programs(1) - 1:
            wait_behind_others(EARLY)
            latents = Latents(cache_ptr, projected_ptr, norm_weight_ptr, cos_ptr, signed_sin_ptr, slot_mapping_ptr)
            for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
                write_row(latents, row, eps, projected_stride, turn_stride, OUT, HALF, OUT_TILE, HALF_TILE)
            return
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    columns = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_column = (columns < OUT) | (OUT % COLUMN_TILE == 0)
    head_ptrs = heads_ptr + rows * row_stride + head * head_stride
    out_ptrs = out_ptr + rows * out_row_stride + head * out_head_stride
    channels = tl.arange(0, CHANNEL_TILE)
    map_ptrs = maps_ptr + (head.to(tl.int64) * IN + channels)[:, None] * OUT + columns[None, :]
    acc = _sums_of_head(head_ptrs, map_ptrs, is_row, is_column, IN, OUT, CHANNEL_TILE, AHEAD, EARLY)
    is_entry = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs[:, None] + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_entry)
    if HALF > 0:  # noqa: SIM102
        if tl.program_id(0) == 0:
            cos, sin = cos_ptr + rows * turn_stride, signed_sin_ptr + rows * turn_stride
            _turn(out_ptrs + OUT, head_ptrs + IN, cos, sin, is_row, HALF, HALF_TILE)


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
    assert (cos is None) == (signed_sin is None)
    return _launch(heads, maps, cos, signed_sin, None, None, None, None, 0.0)


@cache
def _sizes(in_width: int, out_width: int, rotated: int) -> dict[str, int]:
    """Return compile-time constants and the stages; they are kept, since every layer asks for them."""
    return {
        "IN": in_width,
        "OUT": out_width,
        "OUT_TILE": triton.next_power_of_2(out_width),
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
    num_rows, _, rank = len(heads), *maps.shape[1:]
    row_width = rank + cos.shape[1]
    assert_rows_of(projected, num_rows, row_width)
    assert_whole((cache,), cache.shape[0], row_width)
    assert_rows_of(norm_weight, rank)
    assert slot_mapping.shape == (num_rows,)
    return _launch(heads, maps, cos, signed_sin, cache, projected, norm_weight, slot_mapping, eps)


def _launch(
    heads: torch.Tensor,
    maps: torch.Tensor,
    cos: torch.Tensor | None,
    signed_sin: torch.Tensor | None,
    cache: torch.Tensor | None,
    projected: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Launch the products; with a `cache`, its rows are written too."""
    num_rows, num_heads, _ = heads.shape
    _, in_width, out_width = maps.shape
    rotated = 0 if cos is None else cos.shape[1]
    assert 0 < num_rows <= MAX_HEAD_ROWS
    assert_rows_of(heads, num_rows, num_heads, in_width + rotated)
    assert_whole((maps,), num_heads, in_width, out_width)
    assert heads.dtype == maps.dtype
    if cos is not None and signed_sin is not None:
        assert_rows_of(cos, num_rows, rotated)
        assert cos.stride() == signed_sin.stride() and signed_sin.shape == cos.shape
    out = heads.new_empty(num_rows, num_heads, out_width + rotated)
    with launch_on(heads):
        _multiply_heads[(triton.cdiv(out_width, _COLUMNS), num_heads + (cache is not None))](
            out,
            heads,
            maps,
            cos,
            signed_sin,
            cache,
            projected,
            norm_weight,
            slot_mapping,
            num_rows,
            out.stride(0),
            out.stride(1),
            heads.stride(0),
            heads.stride(1),
            0 if cos is None else cos.stride(0),
            0 if projected is None else projected.stride(0),
            eps,
            AHEAD=loads_ahead(),
            **placed(True),
            **_sizes(in_width, out_width, rotated),
        )
    return out
