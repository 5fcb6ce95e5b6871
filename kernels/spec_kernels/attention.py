"""Attention of the newest query rows of each request over a paged KV cache: a few rows of decoding, or a prompt chunk.

A decoding row's result is a fixed sequence of roundings. Key tiles and splits start at absolute positions. For 1 to
`MAX_DECODE_QUERIES` query rows, tiles of 16 and of 32 pairs add in the same order. Splits are merged one after another,
in ascending order. So a row's bits do not depend on other query rows, other requests, `max_seq_len`, or how many
programs share its splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton

from spec_kernels.attention_decode import attend_split
from spec_kernels.attention_prompt import attend_chunk
from spec_kernels.attention_tiles import (
    MAX_DECODE_QUERIES,
    NUM_TILES_TO_FILL,
    decode_tiles,
    prompt_tiles,
    tree_tiles,
)
from spec_kernels.early import placed_if_few
from spec_kernels.narrow_kv_reference import assert_cache_of
from spec_kernels.operators import operator
from spec_kernels.split_merge import empty_partials, merge_partials
from spec_kernels.utils import assert_rows_of, launch_on

_EVERY_KEY = 1 << 30
_LOG2_E = 1.4426950408889634


@operator("paged_attention")
def paged_attention(
    queries: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    split_keys: int,
    scale: float,
    window: int | None,
    path_slots: torch.Tensor | None = None,
    depths: torch.Tensor | None = None,
    num_tail: int = 0,
    sinks: torch.Tensor | None = None,
    powers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest query rows of each request over its paged keys and values: [batch * num_queries,
    num_heads * head_dim].

    In a chain, query row j of a request sees the key positions [max(0, end - window), end) with
    `end = seq_lens - (num_queries - 1 - j)`. A row that sees nothing gives zeros. Positions from `max_seq_len` on, and
    those of the scratch page, are not read. `seq_lens` is read on the device only.

    For a row of a tree, the keys are the prefix (all but the newest `num_tail`) and then those on its own path, as if
    these were consecutive. So a row has the same bits as in a decoded chain of its path.

    Args:
        queries: [batch * num_queries, num_heads, head_dim], any stride but that of the last dimension, which is 1. Over
            a cache in e4m3, up to `MAX_DECODE_QUERIES` rows in float16 are rounded to nine significant bits.
        kv: [num_slots, 2, num_kv_heads, head_dim], contiguous, of the queries' dtype, or e4m3; slot = page * page_size
            + offset.
        page_table: [batch, num_pages + 1] int64; the last column is the scratch page and is not read.
        seq_lens: [batch] int64 number of keys of each request up to its last query row; for a tree, of all keys.
        max_seq_len: upper bound of `seq_lens` known to the host; bounds the launch grid and the positions read.
        split_keys: keys in a split, see `choose_split_keys`. Keys of a prompt chunk, a chain of more than
            `MAX_DECODE_QUERIES` rows, are not split.
        window: the number of newest keys that a row sees; None for all.
        path_slots: [batch, num_queries, positions] int64, contiguous, for a tree: the cache slots of the keys that a
            row sees after the prefix, up to its own; None for a chain.
        depths: [batch, num_queries] int64, contiguous, for a tree: position of each row after the prefix.
        num_tail: the number of a tree's keys after the prefix.
        sinks: [num_heads] float32, contiguous: for each head the score of one more key, whose value is zero; None for
            none.
        powers: [num_slots, num_kv_heads, 2] bfloat16, contiguous, of a cache in e4m3 (`narrow_kv_reference`); None for
            another.
    """
    num_rows, num_heads, head_dim = queries.shape
    assert_rows_of(kv, kv.shape[0], 2, kv.shape[2], head_dim)
    assert kv.is_contiguous() and queries.stride(2) == 1 and page_table.stride(1) == 1
    assert num_rows % page_table.shape[0] == 0 and num_heads % kv.shape[2] == 0
    assert_cache_of(kv, powers, queries.dtype)
    num_queries = num_rows // page_table.shape[0]
    reach = (min(max_seq_len, (page_table.shape[1] - 1) * page_size), _EVERY_KEY if window is None else window)
    heads = _heads(queries, kv, page_size)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    pairs = None if powers is None else powers.view(torch.int32)
    inputs = _Inputs(queries, kv, pairs, page_table, seq_lens, sinks)
    out = queries.new_empty(num_rows, num_heads * head_dim)
    with launch_on(out):
        if path_slots is not None:
            assert depths is not None and path_slots.is_contiguous() and depths.is_contiguous()
            assert path_slots.shape[:2] == (page_table.shape[0], num_queries)
            _launch_splits(out, inputs, (path_slots, depths), num_tail, reach, scale, split_keys, heads)
        elif num_queries > MAX_DECODE_QUERIES:
            _launch_chunk(out, inputs, reach, scale, heads)
        else:
            _launch_splits(out, inputs, (seq_lens, seq_lens), 0, reach, scale, split_keys, heads)
    return out


class _Inputs(NamedTuple):
    """What both kernels read; `powers` as numbers of 32 bits."""

    queries: torch.Tensor
    kv: torch.Tensor
    powers: torch.Tensor | None
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None


def _heads(queries: torch.Tensor, kv: torch.Tensor, page_size: int) -> dict[str, int]:
    """Return the compile-time constants that both kernels share, which describe heads and pages."""
    num_heads, head_dim = queries.shape[1:]
    return {
        "GROUP": num_heads // kv.shape[2],
        "NUM_KV_HEADS": kv.shape[2],
        "HEAD_DIM": head_dim,
        "CHANNEL_TILE": _channel_tile(head_dim),
        "PAGE_SIZE": page_size,
    }


@cache
def _channel_tile(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _strides(queries: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor) -> tuple[int, ...]:
    return queries.stride(0), queries.stride(1), kv.stride(0), page_table.stride(0)


def _launch_splits(
    out: torch.Tensor,
    inputs: _Inputs,
    tree: tuple[torch.Tensor, ...],
    num_tail: int,
    reach: tuple[int, int],
    scale: float,
    split_keys: int,
    heads: dict[str, int],
) -> None:
    """Launch a program for each split of each tile, or for each tile if there are many.

    A tree also has programs for each query row and each split from the root's on. Those of the root's split come first.

    Args:
        tree: path slots and depths; ignored for a chain, whose `num_tail` is 0.
        reach: the number of positions that can be read, and the window.
    """
    queries, kv, powers, page_table, seq_lens, sinks = inputs
    batch, num_rows, num_heads, head_dim = page_table.shape[0], *queries.shape
    path_len = tree[0].shape[2] if num_tail > 0 else 0
    num_splits = max(1, triton.cdiv(reach[0], split_keys))
    element_size = 4 if queries.dtype is torch.float32 else kv.element_size()
    division = _division(queries.shape, kv.shape, batch, element_size, split_keys, num_splits, path_len)
    partials = empty_partials(division.num_entries, num_rows, num_heads, head_dim, out.device)
    attend_split[division.grid](
        out,
        partials.acc,
        partials.sums,
        partials.maxima,
        queries,
        kv,
        powers,
        page_table,
        seq_lens,
        tree[0],
        tree[1],
        seq_lens if sinks is None else sinks,
        num_rows // batch,
        num_tail,
        path_len,
        division.num_own,
        division.num_shared,
        division.num_splits,
        reach[0],
        reach[1],
        scale * _LOG2_E,
        *_strides(queries, kv, page_table),
        num_rows * num_heads,
        split_keys,
        **heads,
        IS_WHOLE=division.is_whole,
        HAS_SINKS=sinks is not None,
        **placed_if_few(division.grid[0] * division.grid[1] * division.grid[2]),
        **division.constants,
    )
    if division.num_entries > 0:
        depths = tree[1] if num_tail > 0 else None
        merge_partials(out, partials, seq_lens, reach, split_keys, depths, num_tail, division.is_whole, sinks)


@dataclass(frozen=True, slots=True)
class _Division:
    """The division of rows and splits among the programs of a launch.

    Attributes:
        num_own: programs of a KV head that each take the root's split for a tile of one query row of a tree.
        num_shared: programs of a KV head that take the splits before a tree's root, or those of a chain.
        num_splits: how many of the shared programs a row tile has.
        num_entries: the number of a row's partial results; 0 if there is nothing to merge.
        is_whole: a shared program takes all splits of its row tile, one after another.
        constants: compile-time constants of tree and tiles, and the number of warps.
    """

    grid: tuple[int, int, int]
    num_own: int
    num_shared: int
    num_splits: int
    num_entries: int
    is_whole: bool
    constants: dict[str, int]


@cache
def _division(
    queries: torch.Size, kv: torch.Size, batch: int, element_size: int, split_keys: int, num_splits: int, path_len: int
) -> _Division:
    """Divide the splits of all rows; `path_len` is 0 for a chain. The result is kept, since every layer asks for it."""
    (num_rows, num_heads, head_dim), num_kv_heads = queries, kv[2]
    group = num_heads // num_kv_heads
    num_pairs = num_rows // batch * group
    tiles = (tree_tiles if path_len > 0 else decode_tiles)(num_pairs, _channel_tile(head_dim), element_size)
    assert split_keys % tiles.keys == 0
    num_tiles = batch * triton.cdiv(num_pairs, tiles.rows)
    is_whole = num_splits == 1 or num_tiles * num_kv_heads >= NUM_TILES_TO_FILL
    if is_whole:
        num_splits = 1
    num_own, num_entries, grid = 0, 0 if is_whole else num_splits, (num_tiles, num_kv_heads, num_splits)
    if path_len > 0:
        num_own = num_rows * triton.cdiv(group, tiles.rows)
        own_splits = (split_keys + path_len - 2) // split_keys + 1
        num_entries = 1 + own_splits if is_whole else num_splits
        grid = (num_own * own_splits + num_tiles * num_splits, num_kv_heads, 1)
    constants = {
        "IS_TREE": path_len > 0,
        "ROW_TILE": tiles.rows,
        "KEY_TILE": tiles.keys,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
    return _Division(grid, num_own, num_tiles * num_splits, num_splits, num_entries, is_whole, constants)


def _launch_chunk(
    out: torch.Tensor,
    inputs: _Inputs,
    reach: tuple[int, int],
    scale: float,
    heads: dict[str, int],
) -> None:
    """Launch a program for each row tile of each head of each request's prompt chunk."""
    queries, kv, powers, page_table, seq_lens, sinks = inputs
    num_queries = queries.shape[0] // page_table.shape[0]
    tiles = prompt_tiles(heads["CHANNEL_TILE"], queries.element_size())
    attend_chunk[triton.cdiv(num_queries, tiles.rows), queries.shape[1], page_table.shape[0]](
        out,
        queries,
        kv,
        powers,
        page_table,
        seq_lens,
        seq_lens if sinks is None else sinks,
        num_queries,
        reach[0],
        reach[1],
        scale * _LOG2_E,
        *_strides(queries, kv, page_table),
        **heads,
        ROW_TILE=tiles.rows,
        KEY_TILE=tiles.keys,
        STAGES=tiles.num_stages,
        IS_WINDOWED=reach[1] < _EVERY_KEY,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
    )
