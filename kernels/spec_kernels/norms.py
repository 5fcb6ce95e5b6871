"""RMSNorm in one launch, where torch takes one for the norm and one for its weight."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.utils import assert_rows_of, launch_on


@triton.jit
def normed_row(
    source: tl.tensor, weight: tl.tensor, is_channel: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Norm one row at these addresses in float32, and round before and after the weight, as the models do."""
    row = tl.load(source, mask=is_channel, other=0.0)
    wide = row.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(row.dtype)
    return (scaled.to(tl.float32) * tl.load(weight, mask=is_channel, other=0.0).to(tl.float32)).to(row.dtype)


@triton.jit
def _rms_norm(
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, SIZE_TILE)
    is_channel = channels < SIZE
    out = normed_row(rows_ptr + row * row_stride + channels, weight_ptr + channels, is_channel, eps, SIZE)
    tl.store(out_ptr + row * SIZE + channels, out, mask=is_channel)


@torch.library.custom_op("spec_kernels::rms_norm", mutates_args=("out",))
def rms_norm(out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Compute rows / rms(rows) * weight, a program a row.

    Args:
        out: [rows, size], contiguous, written.
        rows: [rows, size].
        weight: [size].
    """
    num_rows, size = rows.shape
    assert_rows_of(out, num_rows, size)
    assert_rows_of(rows, num_rows, size)
    assert_rows_of(weight, size)
    assert out.is_contiguous()
    with launch_on(rows):
        _rms_norm[(num_rows,)](
            *(out, rows, weight, rows.stride(0), eps),
            SIZE=size,
            SIZE_TILE=triton.next_power_of_2(size),
            num_warps=8 if size > 1024 else 4,
        )


def rms_norm_reference(out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Do what `rms_norm` does."""
    out.copy_(torch.nn.functional.rms_norm(rows, (rows.shape[1],), None, eps) * weight)
