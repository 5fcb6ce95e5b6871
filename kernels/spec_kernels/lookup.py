"""Prompt lookup in one launch, for every request of a batch.

It appends a round's tokens to the text of each request, and looks for an earlier copy of the text's last n tokens. Up
to K tokens after that copy become the draft tokens.

Torch needs some forty small operators for this. A program reads one text up to its end, in tiles. For every place it
counts how many tokens before it, at most `max_ngram`, agree with the text's end. The longest match wins, and of equally
long ones the latest.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_MOST_PLACES = 2048


@triton.jit(do_not_specialize=["capacity", "token_stride", "num_tokens", "min_ngram", "num_drafts"])
def _look_up(
    drafts_ptr: tl.tensor,
    texts_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    capacity: tl.tensor,
    token_stride: tl.tensor,
    num_tokens: tl.tensor,
    min_ngram: tl.tensor,
    num_drafts: tl.tensor,
    MAX_NGRAM: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    DRAFT_TILE: tl.constexpr,
    PLACE_TILE: tl.constexpr,
) -> None:
    """Finds the drafts of one request."""
    request = tl.program_id(0).to(tl.int64)
    start, count = tl.load(starts_ptr + request), tl.load(counts_ptr + request)
    text_ptr = texts_ptr + tl.load(slot_ids_ptr + request) * capacity

    columns = tl.arange(0, TOKEN_TILE)
    is_new = (columns < count) & (columns < num_tokens) & (start + columns < capacity - 1)
    new = tl.load(tokens_ptr + request * token_stride + columns, mask=is_new, other=0)
    tl.store(text_ptr + start + columns, new, mask=is_new)
    tl.debug_barrier()  # other threads of this program read the tokens that were just written

    length = tl.minimum(start + count, capacity)
    places = tl.arange(0, PLACE_TILE).to(tl.int64)
    best = tl.full((PLACE_TILE,), -1, tl.int64)
    for first in range(0, length, PLACE_TILE):
        ends = first + places
        agrees = ends < length
        longest = tl.zeros((PLACE_TILE,), tl.int64)
        for back in range(1, MAX_NGRAM + 1):
            own = tl.load(text_ptr + length - back, mask=back <= length, other=-1)
            is_there = (ends >= back) & (ends < length)
            agrees &= is_there & (tl.load(text_ptr + ends - back, mask=is_there, other=-2) == own)
            longest += agrees.to(tl.int64)
        best = tl.maximum(best, tl.where(longest >= min_ngram, longest * capacity + ends, -1))
    top = tl.max(best, axis=0)

    offsets = tl.arange(0, DRAFT_TILE)
    found = tl.where(top >= 0, top % capacity, length)
    is_known = (found + offsets < length) & (offsets < num_drafts)
    drafts = tl.load(text_ptr + found + offsets, mask=is_known, other=0)
    tl.store(drafts_ptr + request * num_drafts + offsets, drafts, mask=offsets < num_drafts)


@operator("look_up", mutates_args=("texts",))
def extend_and_look_up(
    texts: torch.Tensor,
    slot_ids: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
    num_draft_tokens: int,
) -> torch.Tensor:
    """Append new tokens to the texts of slots, and return draft tokens by prompt lookup.

    The longest suffix of at most `max_ngram` tokens that also occurs earlier in the text is matched, at its latest
    occurrence. The drafts are the tokens after that match.

    Args:
        texts: [num_slots + 1, capacity] int64, contiguous, written at `slot_ids` before the last column, which is
            scratch of the torch form.
        slot_ids: [batch] int64; requests may share a slot only if their `counts` are 0.
        starts: [batch] int64, the position of a text's first new token.
        tokens: [batch, width] int64.
        counts: [batch] int64, how many of `tokens` are new, 0 to width.
        max_ngram: the most tokens of the text's end that are matched; `min_ngram`, 1 or more, the fewest.

    Returns:
        [batch, num_draft_tokens] int64: 0 where nothing matches, and past the end of the text.
    """
    batch, num_tokens = tokens.shape
    assert_rows_of(tokens, batch, num_tokens)
    for tensor in (slot_ids, starts, counts):
        assert_rows_of(tensor, batch)
    assert texts.is_contiguous() and min_ngram >= 1
    capacity = texts.shape[1]
    drafts = slot_ids.new_empty((batch, num_draft_tokens))
    with launch_on(texts):
        _look_up[(batch,)](
            drafts,
            texts,
            slot_ids,
            starts,
            tokens,
            counts,
            capacity,
            tokens.stride(0),
            num_tokens,
            min_ngram,
            num_draft_tokens,
            MAX_NGRAM=max_ngram,
            TOKEN_TILE=triton.next_power_of_2(num_tokens),
            DRAFT_TILE=triton.next_power_of_2(num_draft_tokens),
            PLACE_TILE=min(triton.next_power_of_2(capacity), _MOST_PLACES),
            num_warps=8,
        )
    return drafts
