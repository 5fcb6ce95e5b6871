"""Adds Qwen's shared expert to the residual stream, scaled by each row's gate."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on


@triton.jit
def _add_gated_share(
    out_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    added_ptr: tl.tensor,
    stream_stride: tl.tensor,
    rows_stride: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, SIZE_TILE)
    is_channel = channels < SIZE
    rows = tl.load(rows_ptr + row * rows_stride + channels, mask=is_channel, other=0.0)
    gate = tl.load(gate_ptr + channels, mask=is_channel, other=0.0)
    added = tl.load(added_ptr + row * SIZE + channels, mask=is_channel, other=0.0)
    stream = tl.load(stream_ptr + row * stream_stride + channels, mask=is_channel, other=0.0)
    logit = tl.sum(rows.to(tl.float32) * gate.to(tl.float32), 0).to(rows.dtype).to(tl.float32)
    share = tl.sigmoid(logit).to(rows.dtype).to(tl.float32)
    part = (added.to(tl.float32) * share).to(rows.dtype).to(tl.float32)
    out = (stream.to(tl.float32) + part).to(rows.dtype)
    tl.store(out_ptr + row * SIZE + channels, out, mask=is_channel)


@operator("add_gated_share")
def add_gated_share(stream: torch.Tensor, rows: torch.Tensor, gate: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Compute stream + sigmoid(rows . gate) * added, rounded after each step.

    Args:
        stream: [rows, size]; `rows` likewise.
        gate: [1, size].
        added: [rows, size], contiguous.
    """
    num_rows, size = stream.shape
    for tensor in (stream, rows, added):
        assert_rows_of(tensor, num_rows, size)
    assert_rows_of(gate, 1, size)
    assert added.is_contiguous()
    out = stream.new_empty(stream.shape)
    with launch_on(out):
        _add_gated_share[(num_rows,)](
            out,
            stream,
            rows,
            gate,
            added,
            stream.stride(0),
            rows.stride(0),
            SIZE=size,
            SIZE_TILE=triton.next_power_of_2(size),
            num_warps=8 if size > 1024 else 4,
        )
    return out
