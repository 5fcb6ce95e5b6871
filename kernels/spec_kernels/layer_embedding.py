"""The per-layer embeddings of Gemma 4 E2B and E4B: a token's row of a per-layer table plus its ordinary embedding,
which is projected and normed.

After the projection this takes seven operators in torch.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.norms import normed_channels
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on


@triton.jit
def _layer_embeddings(
    out_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    projected_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    projected_stride: tl.tensor,
    table_scale: tl.tensor,
    projected_scale: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    NUM_LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
) -> None:
    """Makes the embedding of one layer for one row."""
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, WIDTH_TILE)
    is_channel = channels < WIDTH
    at = layer * WIDTH + channels
    token = tl.load(tokens_ptr + row)
    projected = tl.load(projected_ptr + row * projected_stride + at, mask=is_channel, other=0.0)
    dtype = projected.dtype
    projected = (projected.to(tl.float32) * projected_scale).to(dtype)
    normed = normed_channels(projected, weight_ptr + channels, is_channel, eps, WIDTH)
    of_token = tl.load(table_ptr + token * (NUM_LAYERS * WIDTH) + at, mask=is_channel, other=0.0)
    of_token = (of_token.to(tl.float32) * table_scale).to(dtype)
    both = (normed.to(tl.float32) + of_token.to(tl.float32)).to(dtype)
    out = (both.to(tl.float32) * scale).to(dtype)
    tl.store(out_ptr + row * (NUM_LAYERS * WIDTH) + at, out, mask=is_channel)


@operator("layer_embeddings")
def layer_embeddings(
    tokens: torch.Tensor,
    table: torch.Tensor,
    table_scale: float,
    projected: torch.Tensor,
    projected_scale: float,
    weight: torch.Tensor,
    eps: float,
    scale: float,
) -> torch.Tensor:
    """Compute (norm(projected * projected_scale) + table[tokens] * table_scale) * scale, rounded after each step;
    returns [rows, num_layers, width].

    Args:
        tokens: [rows] int64, contiguous.
        table: [vocab, num_layers * width], contiguous.
        projected: [rows, num_layers * width].
        weight: [width], of the RMSNorm of each layer's part; `eps` is this norm's. The normed row is rounded after the
            product with it, and also before if the weight has the dtype of `projected`.
    """
    (num_rows, all_widths), (width,) = projected.shape, weight.shape
    num_layers = all_widths // width
    assert_rows_of(tokens, num_rows)
    assert_rows_of(table, table.shape[0], num_layers * width)
    assert_rows_of(projected, num_rows, num_layers * width)
    assert table.is_contiguous() and tokens.is_contiguous()
    out = projected.new_empty(num_rows, num_layers, width)
    with launch_on(out):
        _layer_embeddings[(num_rows, num_layers)](
            out,
            tokens,
            table,
            projected,
            weight,
            projected.stride(0),
            table_scale,
            projected_scale,
            scale,
            eps,
            NUM_LAYERS=num_layers,
            WIDTH=width,
            WIDTH_TILE=triton.next_power_of_2(width),
            num_warps=1,
        )
    return out
