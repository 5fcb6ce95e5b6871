"""Attention of a few query rows for each request over a paged cache of latent rows (MLA), split over the keys.

All heads read the same cache row of a token. The whole row is the key, and part of it the value. So a tile of (query
row, head) pairs loads each cache row once. As in `attention.py`, a row's result is a fixed tree of roundings. Tiles and
splits start at absolute positions, and have one shape for any number of query rows. Splits are merged in a fixed order.

Sources: DeepSeek-V2 (arXiv 2405.04434) for the absorbed form, FlashMLA for one load of a key tile for both products.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from spec_kernels.attention_tiles import Tiles, choose_latent_tiles
from spec_kernels.early import placed_if_few, wait_behind_others
from spec_kernels.latent_merge import MOST_EARLY_PROGRAMS, merge_latents
from spec_kernels.online_softmax import add_keys_across, divisor, key_slots
from spec_kernels.operators import operator
from spec_kernels.split_merge import empty_partials
from spec_kernels.utils import assert_rows_of, launch_on

_EVERY_KEY = 1 << 30
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_queries", "num_readable", "window", "split_stride", "split_keys"])
def _attend_latents(
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    page_table_stride: tl.tensor,
    split_stride: tl.tensor,
    split_keys: tl.tensor,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROTATED_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Attends one tile of (query row, head) pairs over the keys of one split.

    It writes the result if IS_WHOLE, else unnormalised sums and the largest scores. The pairs are the columns of all
    products.
    """
    tiles_per_request = tl.cdiv(num_queries * NUM_HEADS, ROW_TILE)
    request = tl.program_id(0) // tiles_per_request
    first_row = tl.program_id(0) % tiles_per_request * ROW_TILE
    split = tl.program_id(1)

    # No kernel of this forward writes seq_lens.
    first_end = tl.load(seq_lens_ptr + request, cache_modifier=".cg").to(tl.int32) - (num_queries - 1)
    wait_behind_others(EARLY)
    first_query = first_row // NUM_HEADS
    last_query = tl.minimum((first_row + ROW_TILE - 1) // NUM_HEADS, num_queries - 1)
    low = tl.maximum(first_end + first_query - window, split * split_keys)
    high = tl.minimum(tl.minimum(first_end + last_query, num_readable), (split + 1) * split_keys)
    # Without keys, the output of this split would not be read. The outer branch is taken at compile time.
    if not IS_WHOLE:  # noqa: SIM102
        if low >= high:
            return

    pairs = first_row + tl.arange(0, ROW_TILE)
    query = pairs // NUM_HEADS
    is_row = query < num_queries
    end = tl.where(is_row, tl.minimum(first_end + query, num_readable), 0)
    start = first_end + query - window
    out_row = (request * num_queries + query).to(tl.int64)
    query_rows = queries_ptr + out_row * query_row_stride + pairs % NUM_HEADS * query_head_stride
    channels = tl.arange(0, RANK_TILE)
    turned = RANK + tl.arange(0, ROTATED_TILE)
    is_channel = (channels < RANK) | (RANK == RANK_TILE)
    is_turned = (turned < ROW_WIDTH) | (ROW_WIDTH - RANK == ROTATED_TILE)
    query_ptrs = query_rows[None, :] + channels[:, None]
    queries = tl.load(query_ptrs, mask=is_row[None, :] & is_channel[:, None], other=0.0)
    query_ptrs = query_rows[None, :] + turned[:, None]
    turned_queries = tl.load(query_ptrs, mask=is_row[None, :] & is_turned[:, None], other=0.0)
    pages_ptr = page_table_ptr + request * page_table_stride

    maxima = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    sums = tl.zeros((ROW_TILE,), tl.float32)
    acc = tl.zeros((RANK_TILE, ROW_TILE), tl.float32)
    for first_key in tl.range(low // KEY_TILE * KEY_TILE, high, KEY_TILE, num_stages=STAGES):
        keys = first_key + tl.arange(0, KEY_TILE)
        # Keys out of range are never loaded, since they may be NaN.
        is_key = (keys >= low) & (keys < high)
        slots = key_slots(pages_ptr, keys, low, high, PAGE_SIZE)
        row_ptrs = cache_ptr + (slots * ROW_WIDTH)[:, None]
        latents = tl.load(row_ptrs + channels[None, :], mask=is_key[:, None] & is_channel[None, :], other=0.0)
        turned_keys = tl.load(row_ptrs + turned[None, :], mask=is_key[:, None] & is_turned[None, :], other=0.0)

        # None of these branches is ever false. The compiler puts the outer one behind the loads of the next tile, so
        # they run while this tile is added. Without it they would begin when the tile has been added, and the next tile
        # would wait for them. A product gets all warps along its keys if another one follows in its block, and 64 keys
        # have room for four. So the products of scores have blocks of their own: other warps take other columns there.
        if first_key < high:
            scores = tl.zeros((KEY_TILE, ROW_TILE), tl.float32)
            if low < high:
                scores = tl.dot(latents, queries, input_precision="ieee")
            if first_key >= 0:
                scores = tl.dot(turned_keys, turned_queries, scores, input_precision="ieee")
            is_visible = (keys[:, None] >= start[None, :]) & (keys[:, None] < end[None, :]) & is_key[:, None]
            scores = tl.where(is_visible, scores * scale, float("-inf"))
            maxima, sums, acc = add_keys_across(maxima, sums, acc, scores, latents)

    out_head = out_row * NUM_HEADS + pairs % NUM_HEADS
    if IS_WHOLE:
        acc = acc / divisor(sums)[None, :]
    else:
        out_head += split.to(tl.int64) * split_stride
        tl.store(sums_ptr + out_head, sums, mask=is_row)
        tl.store(maxima_ptr + out_head, maxima, mask=is_row)
    out_ptrs = out_ptr + out_head[None, :] * RANK + channels[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_channel[:, None])


@operator("latent_attention")
def latent_attention(
    queries: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    split_keys: int,
    scale: float,
    window: int | None,
    value_width: int,
) -> torch.Tensor:
    """Attention of the newest query rows of each request over its paged latent rows: [batch * num_queries, num_heads,
    value_width].

    `paged_attention` defines which keys a row sees. There may be any number of query rows, but it is made for 1 to 16.

    Args:
        queries: [batch * num_queries, num_heads, row_width], any stride but that of the last dimension, which is 1.
        cache: [num_slots, row_width], contiguous, of the queries' dtype. Whole rows are keys, and their first
            `value_width` numbers are values; slot = page * page_size + offset.
        page_table: [batch, num_pages + 1] int64; the last column is the scratch page and is not read.
        seq_lens: [batch] int64 number of keys of each request up to its last query row.
        max_seq_len: upper bound of `seq_lens` known to the host; bounds the launch grid and the positions read.
        split_keys: keys in a split, a multiple of 64; see `choose_latent_split_keys`.
        window: the number of newest keys that a row sees; None for all.
        value_width: less than the width of a row.
    """
    batch, num_columns = page_table.shape
    (num_rows, num_heads, row_width), rank = queries.shape, value_width
    window = _EVERY_KEY if window is None else window
    assert_rows_of(cache, cache.shape[0], row_width)
    assert cache.is_contiguous() and queries.stride(2) == 1 and page_table.stride(1) == 1
    assert num_rows % batch == 0 and rank < row_width and queries.dtype == cache.dtype
    out = queries.new_empty(num_rows, num_heads, rank)
    tiles = choose_latent_tiles(num_heads, queries.element_size())
    assert split_keys % tiles.keys == 0
    num_queries = num_rows // batch
    num_readable = min(max_seq_len, (num_columns - 1) * page_size)
    num_splits = max(1, triton.cdiv(num_readable, split_keys))
    is_whole = num_splits == 1
    partials = empty_partials(0 if is_whole else num_splits, num_rows, num_heads, rank, out.device)

    num_tiles = batch * triton.cdiv(num_queries * num_heads, tiles.rows)
    with launch_on(out):
        _attend_latents[(num_tiles, num_splits)](
            out if is_whole else partials.acc,
            partials.sums,
            partials.maxima,
            queries,
            cache,
            page_table,
            seq_lens,
            num_queries,
            num_readable,
            window,
            scale * _LOG2_E,
            queries.stride(0),
            queries.stride(1),
            page_table.stride(0),
            num_rows * num_heads,
            split_keys,
            IS_WHOLE=is_whole,
            **placed_if_few(num_tiles * num_splits, MOST_EARLY_PROGRAMS),
            **_constants(tiles, num_heads, rank, row_width, page_size),
        )
        if not is_whole:
            most_splits = triton.cdiv((num_columns - 1) * page_size, split_keys)
            merge_latents(out, partials, seq_lens, (num_readable, window), split_keys, most_splits)
    return out


@cache
def _constants(tiles: Tiles, num_heads: int, rank: int, row_width: int, page_size: int) -> dict[str, int]:
    """Return the other compile-time constants and the number of warps; they are kept, since every layer asks for
    them."""
    return {
        "NUM_HEADS": num_heads,
        "RANK": rank,
        "ROW_WIDTH": row_width,
        "RANK_TILE": max(16, triton.next_power_of_2(rank)),
        "ROTATED_TILE": max(16, triton.next_power_of_2(row_width - rank)),
        "PAGE_SIZE": page_size,
        "ROW_TILE": tiles.rows,
        "KEY_TILE": tiles.keys,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
