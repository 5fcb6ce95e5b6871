"""The activation of a gated MLP. Also a kernel for activation(gate) * up, for use beside the library's products."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

ACTIVATIONS = ("silu", "gelu_tanh")

_TILE = 1024


@triton.jit
def activate(gate: tl.tensor, IS_GELU: tl.constexpr) -> tl.tensor:
    """Computes silu, or gelu in its tanh form: tanh(x) is 2 * sigmoid(2x) - 1."""
    if IS_GELU:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * tl.sigmoid(gate)


@triton.jit
def gated_within(gate: tl.tensor, up: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Computes gpt-oss's (up + 1) * gate * sigmoid(1.702 * gate), with gate at most `limit`, and up no farther
    from 0."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1) * gate * tl.sigmoid(1.702 * gate)


def activate_reference(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Do what `activate` does, by the activation's name."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


@triton.jit
def _gate(
    out_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = channels < size
    gate = tl.load(gate_ptr + row * gate_stride + channels, mask=is_channel, other=0.0)
    up = tl.load(up_ptr + row * up_stride + channels, mask=is_channel, other=0.0)
    active = activate(gate.to(tl.float32), IS_GELU).to(gate.dtype)
    out = (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * size + channels, out, mask=is_channel)


@operator("gated")
def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute activation(gate) * up, rounded after the activation and after the product.

    Args:
        gate: [rows, size]; `up` likewise.
        activation: one of `ACTIVATIONS`.
    """
    num_rows, size = gate.shape
    assert_rows_of(gate, num_rows, size)
    assert_rows_of(up, num_rows, size)
    assert activation in ACTIVATIONS
    out = gate.new_empty(gate.shape)
    with launch_on(out):
        _gate[(num_rows, triton.cdiv(size, _TILE))](
            out,
            gate,
            up,
            gate.stride(0),
            up.stride(0),
            size,
            TILE=_TILE,
            IS_GELU=activation == "gelu_tanh",
        )
    return out
