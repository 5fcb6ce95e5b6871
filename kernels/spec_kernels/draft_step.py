"""The work after a draft step: stores the draft in its column, and hands its token and hidden state to the next step
if there is one.

The index of the step is a tensor of one element, so one captured step can be replayed for every column (vLLM #41162,
`update_eagle_draft_inputs`). `metadata` advances positions and lengths.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_CHANNEL_TILE = 1024


@triton.jit(do_not_specialize=["num_draft_tokens"])
def _update(
    draft_tokens_ptr: tl.tensor,
    next_tokens_ptr: tl.tensor,
    next_hidden_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    column_ptr: tl.tensor,
    num_draft_tokens: tl.tensor,
    draft_stride: tl.tensor,
    next_hidden_stride: tl.tensor,
    hidden_stride: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Copies CHANNEL_TILE channels of one request; the first tile also copies its token."""
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tl.load(column_ptr)
    token = tl.load(tokens_ptr + request)
    if tile == 0:
        tl.store(draft_tokens_ptr + request * draft_stride + column, token)
    if column < num_draft_tokens - 1:
        if tile == 0:
            tl.store(next_tokens_ptr + request, token)
        channels = tile * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
        is_channel = channels < HIDDEN_SIZE
        hidden = tl.load(hidden_ptr + request * hidden_stride + channels, mask=is_channel)
        tl.store(next_hidden_ptr + request * next_hidden_stride + channels, hidden, mask=is_channel)


@operator("update_draft_inputs", mutates_args=("draft_tokens", "next_tokens", "next_hidden"))
def update_draft_inputs(
    draft_tokens: torch.Tensor,
    next_tokens: torch.Tensor,
    next_hidden: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    column: torch.Tensor,
) -> None:
    """Store a step's drafts, and hand them and their hidden states to the next step, unless it was the last.

    Args:
        draft_tokens: [batch, K] int64; column `column` is written.
        next_tokens: [batch] int64, written; unchanged by the last step.
        next_hidden: [batch, hidden_size], written; also unchanged by the last step.
        tokens: [batch] int64 drafts of this step.
        hidden: [batch, hidden_size] the outputs from which these were picked, of the same dtype as `next_hidden`.
        column: [1] int64, from 0 to K - 1.
    """
    batch, num_draft_tokens = draft_tokens.shape
    hidden_size = hidden.shape[1]
    assert_rows_of(draft_tokens, batch, num_draft_tokens)
    assert_rows_of(next_tokens, batch)
    assert_rows_of(tokens, batch)
    assert_rows_of(next_hidden, batch, hidden_size)
    assert_rows_of(hidden, batch, hidden_size)
    assert_rows_of(column, 1)
    assert next_hidden.dtype == hidden.dtype
    tile = min(_CHANNEL_TILE, triton.next_power_of_2(hidden_size))
    with launch_on(draft_tokens):
        _update[(batch, triton.cdiv(hidden_size, tile))](
            draft_tokens,
            next_tokens,
            next_hidden,
            tokens,
            hidden,
            column,
            num_draft_tokens,
            draft_tokens.stride(0),
            next_hidden.stride(0),
            hidden.stride(0),
            HIDDEN_SIZE=hidden_size,
            CHANNEL_TILE=tile,
        )


def carry_hidden(drafts: torch.Tensor, column: torch.Tensor, before: Any, after: Any) -> None:
    """Call `update_draft_inputs` for states with `tokens` and `hidden`; the next step reads those of `before`."""
    update_draft_inputs(drafts, before.tokens, before.hidden, after.tokens, after.hidden, column)
