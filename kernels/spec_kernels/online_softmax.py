"""The attention kernels share where keys lie, and how sums of weighted values are carried on and merged.

A row's attention over some keys is three things: its largest score, the sum of the weights relative to it, and the
values weighted by them. Decoding has its few rows across, as columns: then keys and channels, of which there are many,
stand where the tensor cores take 64 at a time. Source: FlashAttention-2 (Dao 2023).
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
    """Returns the cache slots of key positions [low, high) by a request's pages, int64."""
    pages = tl.load(pages_ptr + keys // PAGE_SIZE, mask=(keys >= low) & (keys < high), other=0)
    return pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit
def add_keys_across(
    maxima: tl.tensor, sums: tl.tensor, acc: tl.tensor, scores: tl.tensor, value_rows: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Carries rows on over the keys of a tile; `scores` [keys, rows] are -inf where a row does not see a key, `acc` is
    [channels, rows]."""
    new_maxima = tl.maximum(maxima, tl.max(scores, 0))
    shift = finite_or_zero(new_maxima)
    weights = tl.exp2(scores - shift[None, :])
    decay = tl.exp2(maxima - shift)
    sums = tl.fma(sums, decay, tl.sum(weights, 0))
    weights = weights.to(value_rows.dtype)
    acc = tl.dot(tl.trans(value_rows), weights, acc * decay[None, :], input_precision="ieee")
    return new_maxima, sums, acc


@triton.jit
def add_keys_along(
    maxima: tl.tensor, sums: tl.tensor, acc: tl.tensor, scores: tl.tensor, value_rows: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Carries rows on in the same way where they are rows: `scores` are [rows, keys], `acc` is [rows, channels]."""
    new_maxima = tl.maximum(maxima, tl.max(scores, 1))
    shift = finite_or_zero(new_maxima)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maxima - shift)
    sums = tl.fma(sums, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(value_rows.dtype), value_rows, acc * decay[:, None], input_precision="ieee")
    return new_maxima, sums, acc


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

    It is the same bits in every kernel: which product is fused into the sum is written down. Rows that saw none of the
    later keys stay as they are, bit for bit.
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
def divisor(sums: tl.tensor) -> tl.tensor:
    """Returns what to divide by; a row that sees nothing stays zeros."""
    return tl.where(sums > 0, sums, 1.0)
