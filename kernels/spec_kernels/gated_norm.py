"""The norm after the gated delta rule: norms each head, then applies the gate (Qwen3-Next's `RMSNormGated`)."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_PAIR_TILE = 4


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(
    out_ptr: tl.tensor,
    outputs_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_rows: tl.tensor,
    gate_row_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Norms PAIR_TILE (row, head) pairs."""
    pairs = tl.program_id(0) * PAIR_TILE + tl.arange(0, PAIR_TILE)
    channels = tl.arange(0, CHANNEL_TILE)
    row, head = (pairs // NUM_HEADS).to(tl.int64), pairs % NUM_HEADS
    is_channel = channels < HEAD_DIM
    is_entry = (row < num_rows)[:, None] & is_channel[None, :]
    places = ((row * NUM_HEADS + head) * HEAD_DIM)[:, None] + channels[None, :]
    outputs = tl.load(outputs_ptr + places, mask=is_entry, other=0.0)
    gate_ptrs = gate_ptr + (row * gate_row_stride + head * HEAD_DIM)[:, None] + channels[None, :]
    gate = tl.load(gate_ptrs, mask=is_entry, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    scale = tl.rsqrt(tl.sum(outputs * outputs, axis=1) / HEAD_DIM + eps)
    dtype = out_ptr.dtype.element_ty
    # Rounded before and after the weight, as in transformers.
    normed = ((outputs * scale[:, None]).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    tl.store(out_ptr + places, (normed * (gate / (1.0 + tl.exp(-gate)))).to(dtype), mask=is_entry)


@operator("gated_norm")
def gated_norm(outputs: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm each head, multiply by the weight, then by silu of the gate.

    Args:
        outputs: [rows, num_heads, head_dim], contiguous, float32.
        gate: the same shape, of the result's dtype and any row stride.
        weight: [head_dim], of the gate's dtype.
    """
    num_rows, num_heads, head_dim = outputs.shape
    assert_rows_of(gate, num_rows, num_heads, head_dim)
    assert_rows_of(weight, head_dim)
    assert outputs.is_contiguous() and outputs.dtype == torch.float32
    assert gate.stride(1) == head_dim or num_heads == 1
    assert gate.dtype == weight.dtype
    out = torch.empty_like(outputs, dtype=gate.dtype)
    with launch_on(out):
        _gated_norm[(triton.cdiv(num_rows * num_heads, _PAIR_TILE),)](
            out,
            outputs,
            gate,
            weight,
            num_rows,
            gate.stride(0),
            eps,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PAIR_TILE=_PAIR_TILE,
            CHANNEL_TILE=triton.next_power_of_2(head_dim),
        )
    return out
