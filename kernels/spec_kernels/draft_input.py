"""The input of a draft layer: a token's normed embedding, concatenated with a normed hidden state.

EAGLE-3 (arXiv 2503.01840) and multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437) begin with it. In torch it
takes a gather, two norms of two operators each, and a concatenation, for a few rows of some thousand channels.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.norms import normed_row
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on


@triton.jit
def _draft_input(
    out_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    embedding_ptr: tl.tensor,
    embedding_norm_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    hidden_norm_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    embedding_eps: tl.tensor,
    hidden_eps: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
) -> None:
    """Makes one half of one row."""
    row = tl.program_id(0)
    channels = tl.arange(0, SIZE_TILE)
    is_channel = channels < SIZE
    if tl.program_id(1) == 0:
        source = embedding_ptr + tl.load(tokens_ptr + row) * SIZE + channels
        half = normed_row(source, embedding_norm_ptr + channels, is_channel, embedding_eps, SIZE)
        tl.store(out_ptr + row * 2 * SIZE + channels, half, mask=is_channel)
    else:
        source = hidden_ptr + row * hidden_stride + channels
        half = normed_row(source, hidden_norm_ptr + channels, is_channel, hidden_eps, SIZE)
        tl.store(out_ptr + row * 2 * SIZE + SIZE + channels, half, mask=is_channel)


@operator("draft_input")
def draft_input(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    embedding_norm: torch.Tensor,
    embedding_eps: float,
    hidden: torch.Tensor,
    hidden_norm: torch.Tensor,
    hidden_eps: float,
) -> torch.Tensor:
    """Return the normed embedding of each token, followed by the normed hidden state: [rows, 2 * hidden_size].

    Args:
        tokens: [rows] int64.
        embedding: [vocab, hidden_size], contiguous.
        embedding_norm: [hidden_size], of the embedding's dtype; `hidden_norm` likewise.
        hidden: [rows, hidden_size].
    """
    num_rows, size = hidden.shape
    assert_rows_of(tokens, num_rows)
    assert_rows_of(embedding, embedding.shape[0], size)
    assert_rows_of(hidden, num_rows, size)
    assert embedding.is_contiguous() and tokens.is_contiguous()
    out = hidden.new_empty(num_rows, 2 * size)
    with launch_on(hidden):
        _draft_input[(num_rows, 2)](
            out,
            tokens,
            embedding,
            embedding_norm,
            hidden,
            hidden_norm,
            hidden.stride(0),
            embedding_eps,
            hidden_eps,
            SIZE=size,
            SIZE_TILE=triton.next_power_of_2(size),
            num_warps=8 if size > 1024 else 4,
        )
    return out
