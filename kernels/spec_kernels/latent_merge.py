"""Merges the partial results of latent attention's splits. Rows are wide and splits many, so a program takes some
channels of one head and many splits at once.

Which splits are added together, and in which order, depends only on their positions. Splits that a row does not see add
nothing. So a row's bits do not depend on other rows.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.early import placed_if_few, wait_behind_others
from spec_kernels.online_softmax import divisor
from spec_kernels.split_merge import Partials
from spec_kernels.vocabulary import finite_or_zero

_MAX_SPLITS_AT_ONCE = 32
_CHANNELS_AT_ONCE = 128

MOST_EARLY_PROGRAMS = 512
"""The most programs with which a launch of latent attention, or of its merge, starts early. It is more than the usual
64: the sooner such a launch starts, the sooner the next kernel can start to load its matrix."""


@triton.jit(do_not_specialize=["num_queries", "num_readable", "window", "split_stride", "split_keys"])
def merge_wide_splits(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    split_stride: tl.tensor,
    split_keys: tl.tensor,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Merges the splits of some channels of one head of a query row."""
    pair = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    is_channel = (channels < RANK) | (RANK % CHANNEL_TILE == 0)
    row = tl.program_id(0) // NUM_HEADS
    # No kernel of this forward writes seq_lens.
    seq_len = tl.load(seq_lens_ptr + row // num_queries, cache_modifier=".cg").to(tl.int32)
    end = seq_len - (num_queries - 1 - row % num_queries)
    first_split = tl.maximum(end - window, 0) // split_keys
    last_split = tl.cdiv(tl.maximum(tl.minimum(end, num_readable), 0), split_keys)

    wait_behind_others(EARLY)
    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((CHANNEL_TILE,), tl.float32)
    for first in range(first_split // SPLIT_TILE * SPLIT_TILE, last_split, SPLIT_TILE):
        splits = first + tl.arange(0, SPLIT_TILE)
        is_seen = (splits >= first_split) & (splits < last_split)
        entries = splits.to(tl.int64) * split_stride + pair
        maxima = tl.load(maxima_ptr + entries, mask=is_seen, other=float("-inf"))
        sums = tl.load(sums_ptr + entries, mask=is_seen, other=0.0)
        is_cell = is_seen[:, None] & is_channel[None, :]
        values = tl.load(partial_ptr + entries[:, None] * RANK + channels[None, :], mask=is_cell, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        shift = finite_or_zero(new_maximum)
        weights = tl.exp2(maxima - shift)
        decay = tl.exp2(maximum - shift)
        total = tl.fma(total, decay, tl.sum(sums * weights, 0))
        acc = tl.fma(acc, tl.broadcast_to(decay, (CHANNEL_TILE,)), tl.sum(values * weights[:, None], 0))
        maximum = new_maximum
    out = acc / divisor(total)
    tl.store(out_ptr + pair * RANK + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)


def merge_latents(
    out: torch.Tensor,
    partials: Partials,
    seq_lens: torch.Tensor,
    reach: tuple[int, int],
    split_keys: int,
    most_splits: int,
) -> None:
    """Write the merged rows of a launch to `out` [rows, heads, width].

    Args:
        reach: the number of positions that can be read, and the window.
        most_splits: the number of splits of the longest request that the page table allows. How many splits are added
            at once follows from it, not from this launch, so every launch groups its sums alike.
    """
    _, num_rows, num_heads, width = partials.acc.shape
    channel_tile = min(_CHANNELS_AT_ONCE, max(16, triton.next_power_of_2(width)))
    grid = (num_rows * num_heads, triton.cdiv(width, channel_tile))
    merge_wide_splits[grid](
        out,
        partials.acc,
        partials.sums,
        partials.maxima,
        seq_lens,
        num_rows // seq_lens.shape[0],
        reach[0],
        reach[1],
        num_rows * num_heads,
        split_keys,
        NUM_HEADS=num_heads,
        RANK=width,
        SPLIT_TILE=min(_MAX_SPLITS_AT_ONCE, triton.next_power_of_2(most_splits)),
        CHANNEL_TILE=channel_tile,
        **placed_if_few(grid[0] * grid[1], MOST_EARLY_PROGRAMS),
    )
