"""The activation of a gated MLP and its product with the other half, for rows too many to have them in a product."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from spec_kernels.utils import assert_rows_of, launch_on

_TILE = 1024


@triton.jit
def _silu_gate(
    out_ptr: tl.tensor, halves_ptr: tl.tensor, row_stride: tl.tensor, size: tl.tensor, TILE: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = channels < size
    gate = tl.load(halves_ptr + row * row_stride + channels, mask=is_channel, other=0.0)
    up = tl.load(halves_ptr + row * row_stride + size + channels, mask=is_channel, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(gate.dtype)
    out = (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * size + channels, out, mask=is_channel)


@torch.library.custom_op("spec_kernels::silu_gate", mutates_args=("out",))
def silu_gate(out: torch.Tensor, halves: torch.Tensor) -> None:
    """Compute silu(gate) * up, rounded after each.

    Args:
        out: [rows, size], contiguous, written.
        halves: [rows, 2 * size], gates first.
    """
    num_rows, size = out.shape
    assert_rows_of(halves, num_rows, 2 * size)
    assert out.is_contiguous()
    with launch_on(out):
        _silu_gate[(num_rows, triton.cdiv(size, _TILE))](out, halves, halves.stride(0), size, TILE=_TILE)


def silu_gate_reference(out: torch.Tensor, halves: torch.Tensor) -> None:
    """Do what `silu_gate` does."""
    gate, up = halves.chunk(2, dim=1)
    out.copy_(F.silu(gate) * up)
