"""The standing of drafts: their rank and probability under the target, by which deterministic rules decide.

TensorRT-LLM's relaxed acceptance first sorts the top k of every row's softmax (`mtp_relaxed_acceptance_op`). A draft's
rank and probability are enough. Both are sums over the row, so one pass without a sort computes them. Thresholds and
the thinking phase are a few numbers for each request, and stay in torch.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import empty_verdict, operator
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import (
    NO_TOKEN,
    VOCAB_TILE,
    finite_or_zero,
    load_logits,
    lowest_top,
    merge_sums,
    nan_as_largest,
    num_tiles_of,
)


@triton.jit(do_not_specialize=["num_rows"])
def _standing_in_tiles(
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    num_ahead_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    draft_stride: tl.tensor,
    VOCAB_TILE: tl.constexpr,
) -> None:
    """Reads one vocabulary tile of one row: its top, its sum of exponentials, and the number of tokens that rank before
    the row's draft."""
    program = tl.program_id(0)
    request = (program // num_rows).to(tl.int64)
    row = program % num_rows
    tile = tl.program_id(1)
    ids = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
    row_ptr = logits_ptr + request * request_stride + row * row_stride
    logits = load_logits(row_ptr, ids, vocab_size)
    top, top_id = lowest_top(nan_as_largest(logits), ids, 0)

    # The bonus row judges no draft. Its counts are those of token 0, and are not read.
    draft = tl.load(draft_tokens_ptr + request * draft_stride + row, mask=row < num_rows - 1, other=0)
    own = tl.load(row_ptr + draft).to(tl.float32)
    is_ahead = (ids < vocab_size) & ((logits > own) | ((logits == own) & (ids < draft)))
    out = program * tl.num_programs(1) + tile
    tl.store(tops_ptr + out, top)
    tl.store(top_ids_ptr + out, top_id)
    tl.store(sums_ptr + out, tl.sum(tl.exp(logits - finite_or_zero(top)), 0))
    tl.store(num_ahead_ptr + out, tl.sum(is_ahead.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _merge_standing(
    is_top_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    probability_ptr: tl.tensor,
    top_probability_ptr: tl.tensor,
    top_tokens_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    num_ahead_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    draft_stride: tl.tensor,
    TILE_TILE: tl.constexpr,
) -> None:
    """Merges the tiles of one row."""
    program = tl.program_id(0)
    request = (program // num_rows).to(tl.int64)
    row = program % num_rows
    tiles = tl.arange(0, TILE_TILE)
    is_tile = tiles < num_tiles
    parts = program * num_tiles + tiles
    tops = tl.load(tops_ptr + parts, mask=is_tile, other=float("-inf"))
    top, top_token = lowest_top(tops, tl.load(top_ids_ptr + parts, mask=is_tile, other=NO_TOKEN), 0)
    tl.store(top_tokens_ptr + program, top_token)

    is_draft = row < num_rows - 1
    draft = tl.load(draft_tokens_ptr + request * draft_stride + row, mask=is_draft, other=0)
    own = tl.load(logits_ptr + request * request_stride + row * row_stride + draft).to(tl.float32)
    total = merge_sums(tl.load(sums_ptr + parts, mask=is_tile, other=0.0), tops, top, 0)
    rank = tl.sum(tl.load(num_ahead_ptr + parts, mask=is_tile, other=0), 0)
    out = request * (num_rows - 1) + row
    tl.store(is_top_ptr + out, top_token == draft, mask=is_draft)
    tl.store(rank_ptr + out, rank, mask=is_draft)
    # Equal logits give the same exponential and divisor, so a draft as likely as the top has exactly the top's
    # probability.
    tl.store(probability_ptr + out, tl.div_rn(tl.exp(own - finite_or_zero(top)), total), mask=is_draft)
    tl.store(top_probability_ptr + out, tl.div_rn(tl.exp(top - finite_or_zero(top)), total), mask=is_draft)


@operator("draft_standing")
def draft_standing(
    logits: torch.Tensor, draft_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the standing of each draft in the row that judges it, and the argmax of every row.

    Args:
        logits: [batch, K + 1, vocab] float32, float16 or bfloat16.
        draft_tokens: [batch, K] int64 of the vocabulary, of any row stride.

    Returns:
        [batch, K] each: whether the draft is the argmax; its rank, the number of tokens with a larger logit, or an
        equal one and a lower id; its probability, by a softmax in float32; and the largest probability of the row. And
        [batch, K + 1]: the argmax, lowest id on ties.
    """
    batch, num_rows, vocab_size = logits.shape
    assert_rows_of(draft_tokens, batch, num_rows - 1)
    assert logits.stride(2) == 1
    is_top = torch.empty(draft_tokens.shape, dtype=torch.bool, device=logits.device)
    rank, top_tokens = torch.empty_like(is_top, dtype=torch.int64), empty_verdict(logits)[0]
    probability, top = torch.empty((2, *is_top.shape), dtype=torch.float32, device=logits.device).unbind()
    num_tiles = num_tiles_of(vocab_size, VOCAB_TILE)
    tops, sums = torch.empty((2, batch * num_rows, num_tiles), dtype=torch.float32, device=logits.device).unbind()
    top_ids, num_ahead = torch.empty((2, *tops.shape), dtype=torch.int32, device=logits.device).unbind()
    strides = (logits.stride(0), logits.stride(1), draft_tokens.stride(0))
    with launch_on(logits):
        _standing_in_tiles[(batch * num_rows, num_tiles)](
            tops,
            sums,
            top_ids,
            num_ahead,
            logits,
            draft_tokens,
            num_rows,
            vocab_size,
            *strides,
            VOCAB_TILE=VOCAB_TILE,
        )
        _merge_standing[(batch * num_rows,)](
            is_top,
            rank,
            probability,
            top,
            top_tokens,
            tops,
            sums,
            top_ids,
            num_ahead,
            logits,
            draft_tokens,
            num_rows,
            num_tiles,
            *strides,
            TILE_TILE=triton.next_power_of_2(num_tiles),
        )
    return is_top, rank, probability, top, top_tokens
