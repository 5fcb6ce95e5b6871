"""RMSNorm in one launch, where torch takes two, and a sum with a norm of one summand, of the sum, or of both."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.early import placed_if_few, wait_behind_others
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on


@triton.jit
def normed_row(
    source: tl.tensor, weight: tl.tensor, is_channel: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Norm one row at these addresses."""
    return normed_channels(tl.load(source, mask=is_channel, other=0.0), weight, is_channel, eps, SIZE)


@triton.jit
def normed_channels(
    row: tl.tensor, weight: tl.tensor, is_channel: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Norm one row in float32, and round before and after the weight, as the models do. If the weight is float32 and
    the row is not, round only after it (Qwen3.5)."""
    return normed_by(row, tl.load(weight, mask=is_channel, other=0.0), eps, SIZE)


@triton.jit
def normed_by(row: tl.tensor, weights: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Do what `normed_channels` does with weights that are already loaded."""
    wide = row.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if weights.dtype == row.dtype:
        scaled = scaled.to(row.dtype).to(tl.float32)
    return (scaled * weights.to(tl.float32)).to(row.dtype)


@triton.jit
def _rms_norm(
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_behind_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, SIZE_TILE)
    is_channel = channels < SIZE
    out = normed_row(rows_ptr + row * row_stride + channels, weight_ptr + channels, is_channel, eps, SIZE)
    tl.store(out_ptr + row * SIZE + channels, out, mask=is_channel)


@operator("rms_norm")
def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute rows / rms(rows) * weight, with a program for each row.

    Args:
        rows: [rows, size].
        weight: [size]. If it has the rows' dtype, the norm rounds before and after the product with it. If it is
            float32, the norm rounds only after that product.
    """
    num_rows, size = rows.shape
    assert_rows_of(rows, num_rows, size)
    assert_rows_of(weight, size)
    out = rows.new_empty(rows.shape)
    with launch_on(rows):
        _rms_norm[(num_rows,)](
            out,
            rows,
            weight,
            rows.stride(0),
            eps,
            SIZE=size,
            SIZE_TILE=triton.next_power_of_2(size),
            **placed_if_few(num_rows),
            num_warps=8 if size > 1024 else 4,
        )
    return out


@triton.jit
def _add_normed(
    stream_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    added_ptr: tl.tensor,
    weight_ptr: tl.tensor | None,
    scale_ptr: tl.tensor | None,
    next_weight_ptr: tl.tensor | None,
    row_stride: tl.tensor,
    added_stride: tl.tensor,
    eps: tl.tensor,
    next_eps: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, SIZE_TILE)
    is_channel = channels < SIZE
    # No kernel writes weights, so both norms' weights are loaded early.
    if weight_ptr is not None:
        weights = tl.load(weight_ptr + channels, mask=is_channel, other=0.0)
    if next_weight_ptr is not None:
        next_weights = tl.load(next_weight_ptr + channels, mask=is_channel, other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    wait_behind_others(EARLY)
    first = tl.load(rows_ptr + row * row_stride + channels, mask=is_channel, other=0.0)
    added = tl.load(added_ptr + row * added_stride + channels, mask=is_channel, other=0.0)
    if weight_ptr is not None:
        added = normed_by(added, weights, eps, SIZE)
    stream = (first.to(tl.float32) + added.to(tl.float32)).to(first.dtype)
    if scale_ptr is not None:
        stream = (stream.to(tl.float32) * scale).to(first.dtype)
    tl.store(stream_ptr + row * SIZE + channels, stream, mask=is_channel)
    if next_weight_ptr is not None:
        tl.store(out_ptr + row * SIZE + channels, normed_by(stream, next_weights, next_eps, SIZE), mask=is_channel)


@operator("add_normed")
def add_normed(
    rows: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    next_weight: torch.Tensor | None,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stream (rows + norm(added)) * scale, and the next norm of it, which is empty if there is none.

    Args:
        rows: [rows, size]; `added` likewise.
        weight: [size], as `rms_norm` takes it, of the norm of `added` (Gemma's layers); None if there is none.
        scale: [1]; None for 1.
        next_weight: like `weight`, of the next norm.
    """
    num_rows, size = rows.shape
    for tensor in (rows, added):
        assert_rows_of(tensor, num_rows, size)
    for norm in (weight, next_weight):
        assert norm is None or (norm.shape == (size,) and norm.is_contiguous())
    stream, out = rows.new_empty(rows.shape), rows.new_empty(0 if next_weight is None else rows.shape)
    with launch_on(rows):
        _add_normed[(num_rows,)](
            stream,
            out,
            rows,
            added,
            weight,
            scale,
            next_weight,
            rows.stride(0),
            added.stride(0),
            eps,
            next_eps,
            SIZE=size,
            SIZE_TILE=triton.next_power_of_2(size),
            **placed_if_few(num_rows),
            num_warps=8 if size > 1024 else 4,
        )
    return stream, out
