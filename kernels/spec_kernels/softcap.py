"""The cap of Gemma's logits: cap * tanh(logits / cap), in float32, since rounding near the cap would make ties."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_TILE = 2048


@triton.jit
def _softcap(
    out_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    cap: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = tokens < size
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=is_token, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + tokens, (2 * tl.sigmoid(2 * (logits / cap)) - 1) * cap, mask=is_token)


@operator("softcap")
def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute cap * tanh(logits / cap) in float32 for logits [rows, vocab]."""
    num_rows, size = logits.shape
    assert_rows_of(logits, num_rows, size)
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    with launch_on(out):
        _softcap[(num_rows, triton.cdiv(size, _TILE))](out, logits, logits.stride(0), size, cap, TILE=_TILE)
    return out
