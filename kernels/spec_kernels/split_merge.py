"""Merges the partial results of a row's splits, one after another in ascending order, so that every kernel gets the
same bits."""

# mypy: allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from spec_kernels.early import placed_if_few, wait_behind_others
from spec_kernels.online_softmax import divisor, merge, with_sink

STAGES = 12


@dataclass(frozen=True, slots=True)
class Partials:
    """The partial results of splits, for each row and head: the sum of weighted values, the sum of weights, and the
    largest score.

    Attributes:
        acc: [splits, rows, heads, width] float32; junk if a split has no key that the row's tile sees.
        sums: [splits, rows, heads].
        maxima: [splits, rows, heads].
    """

    acc: torch.Tensor
    sums: torch.Tensor
    maxima: torch.Tensor


def empty_partials(num_splits: int, num_rows: int, num_heads: int, width: int, device: torch.device) -> Partials:
    """Allocates partial results."""
    acc = torch.empty((num_splits, num_rows, num_heads, width), dtype=torch.float32, device=device)
    return Partials(acc, *acc.new_empty((2, num_splits, num_rows, num_heads)).unbind())


@triton.jit(do_not_specialize=["num_queries", "num_tail", "num_readable", "window", "split_stride", "split_keys"])
def merge_splits(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_tail: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    split_stride: tl.tensor,
    split_keys: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Merges the splits in which a query row sees keys, for HEAD_TILE heads, one after another; some are read ahead.

    In a tree, all splits before the root's are already merged into the first entry if IS_WHOLE.
    """
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    is_head = heads < NUM_HEADS
    out_head = row.to(tl.int64) * NUM_HEADS + heads
    channels = tl.arange(0, CHANNEL_TILE)
    is_entry = is_head[:, None] & (channels < HEAD_DIM)[None, :]
    offsets = (out_head * HEAD_DIM)[:, None] + channels[None, :]
    stride = split_stride.to(tl.int64)
    # No kernel of this forward writes seq_lens.
    seq_len = tl.load(seq_lens_ptr + row // num_queries, cache_modifier=".cg").to(tl.int32)
    if IS_TREE:
        prefix_len = seq_len - num_tail
        end = prefix_len + tl.load(depths_ptr + row, cache_modifier=".cg").to(tl.int32) + 1
    else:
        end = seq_len - (num_queries - 1 - row % num_queries)
    start = end - window
    first_split = tl.maximum(start, 0) // split_keys
    last_split = tl.cdiv(tl.maximum(tl.minimum(end, num_readable), 0), split_keys)
    if IS_TREE and IS_WHOLE:
        root_split = prefix_len // split_keys
        first_split = tl.maximum(first_split - root_split + 1, 0)
        last_split = tl.maximum(last_split - root_split, 0) + 1

    wait_behind_others(EARLY)
    maxima = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    sums = tl.zeros((HEAD_TILE,), tl.float32)
    acc = tl.zeros((HEAD_TILE, CHANNEL_TILE), tl.float32)
    for split in tl.range(first_split, last_split, num_stages=STAGES):
        entries = stride * split + out_head
        next_maxima = tl.load(maxima_ptr + entries, mask=is_head, other=float("-inf"))
        next_sums = tl.load(sums_ptr + entries, mask=is_head, other=0.0)
        next_acc = tl.load(partial_ptr + stride * split * HEAD_DIM + offsets, mask=is_entry, other=0.0)
        maxima, sums, acc = merge(maxima, sums, acc, next_maxima, next_sums, next_acc, 1)
    if HAS_SINKS:
        sums = with_sink(maxima, sums, sinks_ptr, heads, is_head)
    out = acc / divisor(sums)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=is_entry)


def merge_partials(
    out: torch.Tensor,
    partials: Partials,
    seq_lens: torch.Tensor,
    reach: tuple[int, int],
    split_keys: int,
    depths: torch.Tensor | None = None,
    num_tail: int = 0,
    is_whole: bool = False,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the merged rows of a launch to `out` [rows, heads, width], or a tensor of that size.

    Args:
        reach: the number of positions that can be read, and the window.
        depths: [batch, num_queries] of the rows of a tree with `num_tail` newest keys.
        is_whole: the first entry of a tree holds all shared splits.
        sinks: [heads] float32, as for `paged_attention`.
    """
    _, num_rows, num_heads, width = partials.acc.shape
    channel_tile = max(16, triton.next_power_of_2(width))
    head_tile = min(4, triton.next_power_of_2(num_heads))
    grid = (num_rows, triton.cdiv(num_heads, head_tile))
    merge_splits[grid](
        out,
        partials.acc,
        partials.sums,
        partials.maxima,
        seq_lens,
        seq_lens if depths is None else depths,
        seq_lens if sinks is None else sinks,
        num_rows // seq_lens.shape[0],
        num_tail,
        reach[0],
        reach[1],
        num_rows * num_heads,
        split_keys,
        NUM_HEADS=num_heads,
        HEAD_DIM=width,
        HEAD_TILE=head_tile,
        CHANNEL_TILE=channel_tile,
        STAGES=STAGES,
        IS_TREE=depths is not None,
        IS_WHOLE=is_whole,
        HAS_SINKS=sinks is not None,
        **placed_if_few(grid[0] * grid[1]),
        num_warps=4 if channel_tile <= 128 else 8,
    )
