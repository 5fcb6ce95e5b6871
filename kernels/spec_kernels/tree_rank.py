"""The likeliest tokens below each branch of a tree, with their log probabilities, from a head's logits.

In torch this takes an argmax and a scatter for each token of a branch, a gather, and a logsumexp.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.ordering import TAKEN, in_order, place_of, score_of
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import finite_or_zero, load_logits, merge_sums, nan_as_largest, num_tiles_of

_TILE, _LARGE_TILE, _LARGE_VOCABULARY = 1024, 4096, 65536
"""A small vocabulary is divided into smaller tiles, so that enough programs read a few rows."""


@triton.jit
def _rank_in_tiles(
    order_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.tensor,
    TOPK: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
) -> None:
    """Finds the best tokens of one vocabulary tile of one row, encoded as in `ordering.py`, and its sum of
    exponentials."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
    logits = load_logits(logits_ptr + row * logits_stride, ids, vocab_size)
    out = row * tl.num_programs(1) + tile
    top = tl.max(logits, 0)
    tl.store(maxima_ptr + out, top)
    tl.store(sums_ptr + out, tl.sum(tl.exp(logits - finite_or_zero(top)), 0))
    order = tl.where(ids < vocab_size, in_order(nan_as_largest(logits), ids), TAKEN)
    for rank in range(TOPK):
        best = tl.max(order, 0)
        tl.store(order_ptr + out * TOPK + rank, best)
        order = tl.where(order == best, TAKEN, order)


@triton.jit(do_not_specialize=["num_tiles"])
def _merge_ranks(
    tokens_ptr: tl.tensor,
    log_probs_ptr: tl.tensor,
    order_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    token_map_ptr: tl.tensor,
    num_tiles: tl.tensor,
    MAPPED: tl.constexpr,
    TOPK: tl.constexpr,
    TILE_TILE: tl.constexpr,
    PLACE_TILE: tl.constexpr,
) -> None:
    """Finds the best of all tiles of one row."""
    row = tl.program_id(0).to(tl.int64)
    tiles, places = tl.arange(0, TILE_TILE), tl.arange(0, PLACE_TILE)
    maxima = tl.load(maxima_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    top = tl.max(maxima, 0)
    total = finite_or_zero(top) + tl.log(merge_sums(sums, maxima, top, 0))
    is_place = places < num_tiles * TOPK
    order = tl.load(order_ptr + row * num_tiles * TOPK + places, mask=is_place, other=TAKEN)
    for rank in range(TOPK):
        best = tl.max(order, 0)
        order = tl.where(order == best, TAKEN, order)
        token = place_of(best)
        if MAPPED:
            token = tl.load(token_map_ptr + token)
        tl.store(tokens_ptr + row * TOPK + rank, token)
        # Rounding can make the sum smaller than its largest term, but a child must not be likelier than its parent.
        tl.store(log_probs_ptr + row * TOPK + rank, tl.minimum(score_of(best) - total, 0.0))


@operator("rank_tokens", mutates_args=("tokens", "log_probs"))
def rank_tokens(
    tokens: torch.Tensor, log_probs: torch.Tensor, logits: torch.Tensor, token_map: torch.Tensor | None
) -> None:
    """Find the likeliest tokens of each row; ties go to the lowest id in the head.

    Args:
        tokens: [rows, topk] int64, contiguous, written: the likeliest first.
        log_probs: [rows, topk] float32, contiguous, written: at most 0.
        logits: [rows, vocab] float32, float16 or bfloat16, at least topk of them in a row.
        token_map: [vocab] int64, the target id of each id in the head; None if they are equal.
    """
    (num_rows, vocab_size), topk = logits.shape, tokens.shape[1]
    for tensor in (tokens, log_probs):
        assert_rows_of(tensor, num_rows, topk)
        assert tensor.is_contiguous()
    assert logits.stride(1) == 1 and topk <= vocab_size
    tile = _TILE if vocab_size <= _LARGE_VOCABULARY else _LARGE_TILE
    num_tiles = num_tiles_of(vocab_size, tile)
    order = torch.empty((num_rows, num_tiles, topk), dtype=torch.int64, device=logits.device)
    sums, maxima = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    places = triton.next_power_of_2(num_tiles * topk)
    with launch_on(logits):
        _rank_in_tiles[(num_rows, num_tiles)](
            order, sums, maxima, logits, logits.stride(0), vocab_size, TOPK=topk, VOCAB_TILE=tile
        )
        _merge_ranks[(num_rows,)](
            tokens,
            log_probs,
            order,
            sums,
            maxima,
            tokens if token_map is None else token_map,
            num_tiles,
            MAPPED=token_map is not None,
            TOPK=topk,
            TILE_TILE=triton.next_power_of_2(num_tiles),
            PLACE_TILE=places,
            num_warps=1 if places <= 256 else 4,
        )
