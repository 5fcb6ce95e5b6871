"""The shared parts of the attention kernels: the cache slots of keys, and the update and merge of running sums.

A row's attention over some keys consists of its largest score, the sum of the weights relative to it, and the values
weighted by them. The few rows of decoding are the columns of the products. Keys and channels are many, so they are the
dimension that the tensor cores process 64 at a time. Source: FlashAttention-2 (Dao 2023).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.vocabulary import finite_or_zero


@triton.jit
def key_slots(
    pages_ptr: tl.tensor, keys: tl.tensor, low: tl.tensor, high: tl.tensor, PAGE_SIZE: tl.constexpr
) -> tl.tensor:
    """Returns the cache slots (int64) of the positions `keys` of a request that are in [low, high)."""
    pages = tl.load(pages_ptr + keys // PAGE_SIZE, mask=(keys >= low) & (keys < high), other=0)
    return pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit
def weigh_keys(
    maxima: tl.tensor, sums: tl.tensor, scores: tl.tensor, KEY_AXIS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Adds the weights of a tile's keys, which are along KEY_AXIS of `scores`, to the rows' running sums.

    Scores are -inf for keys that a row does not see. Returns the new maxima and sums, the weights, and what each row's
    sums of earlier values are to be multiplied by.
    """
    new_maxima = tl.maximum(maxima, tl.max(scores, KEY_AXIS))
    shift = finite_or_zero(new_maxima)
    weights = tl.exp2(scores - tl.expand_dims(shift, KEY_AXIS))
    decay = tl.exp2(maxima - shift)
    return new_maxima, tl.fma(sums, decay, tl.sum(weights, KEY_AXIS)), weights, decay


@triton.jit
def merge(
    maxima: tl.tensor,
    sums: tl.tensor,
    acc: tl.tensor,
    next_maxima: tl.tensor,
    next_sums: tl.tensor,
    next_acc: tl.tensor,
    CHANNEL_AXIS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merges rows' attention over some keys with that over later ones.

    The result has the same bits in every kernel, since it is explicit which product is fused into the sum. Rows that
    saw none of the later keys do not change.
    """
    new_maxima = tl.maximum(maxima, next_maxima)
    shift = finite_or_zero(new_maxima)
    decay = tl.exp2(maxima - shift)
    weight = tl.exp2(next_maxima - shift)
    sums = tl.fma(sums, decay, next_sums * weight)
    decay = tl.broadcast_to(tl.expand_dims(decay, CHANNEL_AXIS), acc.shape)
    acc = tl.fma(acc, decay, next_acc * tl.expand_dims(weight, CHANNEL_AXIS))
    return new_maxima, sums, acc


@triton.jit
def with_sink(
    maxima: tl.tensor, sums: tl.tensor, sinks_ptr: tl.tensor, heads: tl.tensor, is_head: tl.tensor
) -> tl.tensor:
    """Returns rows' sums with the weight of their head's sink, a learned score of a key whose value is zero
    (gpt-oss)."""
    scores = tl.load(sinks_ptr + heads, mask=is_head, other=float("-inf")) * 1.4426950408889634
    return sums + tl.exp2(scores - finite_or_zero(maxima))


@triton.jit
def divisor(sums: tl.tensor) -> tl.tensor:
    """Returns the divisor for each row's values; it is 1 for a row that sees no key, whose values stay zero."""
    return tl.where(sums > 0, sums, 1.0)
