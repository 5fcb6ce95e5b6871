"""Attention of a few query rows a request over a paged KV cache, split over the keys (flash-decoding).

A row's result is a fixed tree of roundings: key tiles and splits start at absolute positions, tiles have one shape for
1 to `MAX_DECODE_QUERIES` query rows, and partial results are merged in ascending order. What stands beside a row (more
query rows, other requests, a larger `max_seq_len`) therefore changes no bit of it.

Sources: FlashAttention-2 (Dao 2023) for the online softmax, Flash-Decoding (Dao et al. 2023) for the split.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.attention_tiles import MAX_DECODE_QUERIES, choose_tiles
from spec_kernels.utils import assert_rows_of, launch_on

_MERGED_AT_ONCE = 16
_EVERY_KEY = 1 << 30
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_queries", "num_readable", "window", "split_stride"])
def _attend_split(
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    page_table_stride: tl.tensor,
    split_stride: tl.tensor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> None:
    """Attends one row tile over the keys of one split: the result when IS_WHOLE, else unnormalised sums and their
    maxima."""
    tiles_per_request = tl.cdiv(num_queries * GROUP, ROW_TILE)
    request = tl.program_id(0) // tiles_per_request
    first_row = tl.program_id(0) % tiles_per_request * ROW_TILE
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # What the first query of the tile sees starts first, what the last one sees ends last.
    first_end = tl.load(seq_lens_ptr + request).to(tl.int32) - (num_queries - 1)
    first_query = first_row // GROUP
    last_query = tl.minimum((first_row + ROW_TILE - 1) // GROUP, num_queries - 1)
    low = tl.maximum(first_end + first_query - window, split * SPLIT_KEYS)
    high = tl.minimum(tl.minimum(first_end + last_query, num_readable), (split + 1) * SPLIT_KEYS)
    # Nobody reads what this split would write. The outer branch is taken at compile time.
    if not IS_WHOLE:  # noqa: SIM102
        if low >= high:
            return

    rows = first_row + tl.arange(0, ROW_TILE)
    channels = tl.arange(0, CHANNEL_TILE)
    is_channel = (channels < HEAD_DIM)[None, :]
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = query < num_queries
    end = tl.where(is_row, tl.minimum(first_end + query, num_readable), 0)
    start = first_end + query - window
    out_row = (request * num_queries + query).to(tl.int64)
    query_ptrs = queries_ptr + (out_row * query_row_stride + head * query_head_stride)[:, None] + channels[None, :]
    queries = tl.load(query_ptrs, mask=is_row[:, None] & is_channel, other=0.0)

    maxima = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    sums = tl.zeros((ROW_TILE,), tl.float32)
    acc = tl.zeros((ROW_TILE, CHANNEL_TILE), tl.float32)
    for first_key in range(low // KEY_TILE * KEY_TILE, high, KEY_TILE):
        keys = first_key + tl.arange(0, KEY_TILE)
        # Keys outside are never loaded: what lies there may be NaN.
        is_key = (keys >= low) & (keys < high)
        page_ptrs = page_table_ptr + request * page_table_stride + keys // PAGE_SIZE
        slots = tl.load(page_ptrs, mask=is_key, other=0).to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        key_ptrs = kv_ptr + (slots * slot_stride + kv_head * HEAD_DIM)[:, None] + channels[None, :]
        is_entry = is_key[:, None] & is_channel
        key_rows = tl.load(key_ptrs, mask=is_entry, other=0.0)
        value_rows = tl.load(key_ptrs + NUM_KV_HEADS * HEAD_DIM, mask=is_entry, other=0.0)

        scores = tl.dot(queries, tl.trans(key_rows), input_precision="ieee") * scale
        is_visible = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
        scores = tl.where(is_visible & is_key[None, :], scores, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maxima - shift)
        sums = sums * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(value_rows.dtype), value_rows, acc, input_precision="ieee")
        maxima = new_maxima

    out_head = out_row * (NUM_KV_HEADS * GROUP) + head
    if IS_WHOLE:
        out = acc / tl.where(sums > 0, sums, 1.0)[:, None]
        out_ptrs = out_ptr + out_head[:, None] * HEAD_DIM + channels[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_channel)
    else:
        out_head += split.to(tl.int64) * split_stride
        out_ptrs = out_ptr + out_head[:, None] * HEAD_DIM + channels[None, :]
        tl.store(out_ptrs, acc, mask=is_row[:, None] & is_channel)
        tl.store(sums_ptr + out_head, sums, mask=is_row)
        tl.store(maxima_ptr + out_head, maxima, mask=is_row)


@triton.jit(do_not_specialize=["num_queries", "num_readable", "window", "split_stride"])
def _merge_splits(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    split_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
) -> None:
    """Merges for one head of one query row the splits it sees keys in, SPLIT_TILE of them at a time, in ascending
    order."""
    row = tl.program_id(0)
    out_head = row.to(tl.int64) * NUM_HEADS + tl.program_id(1)
    channels = tl.arange(0, CHANNEL_TILE)
    is_channel = channels < HEAD_DIM
    unclamped_end = tl.load(seq_lens_ptr + row // num_queries).to(tl.int32) - (num_queries - 1 - row % num_queries)
    end = tl.minimum(unclamped_end, num_readable)
    first_split = tl.maximum(unclamped_end - window, 0) // SPLIT_KEYS
    num_splits = tl.cdiv(tl.maximum(end, 0), SPLIT_KEYS)

    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((CHANNEL_TILE,), tl.float32)
    for first in range(first_split // SPLIT_TILE * SPLIT_TILE, num_splits, SPLIT_TILE):
        splits = first + tl.arange(0, SPLIT_TILE)
        is_split = (splits >= first_split) & (splits < num_splits)
        entries = splits.to(tl.int64) * split_stride + out_head
        maxima = tl.load(maxima_ptr + entries, mask=is_split, other=float("-inf"))
        sums = tl.load(sums_ptr + entries, mask=is_split, other=0.0)
        partial_ptrs = partial_ptr + entries[:, None] * HEAD_DIM + channels[None, :]
        partial = tl.load(partial_ptrs, mask=is_split[:, None] & is_channel[None, :], other=0.0)

        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(maxima - shift)
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights * sums, 0)
        acc = acc * decay + tl.sum(weights[:, None] * partial, 0)
        maximum = new_maximum

    out = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + out_head * HEAD_DIM + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)


@torch.library.custom_op("spec_kernels::paged_attention", mutates_args=("out",))
def paged_attention(
    out: torch.Tensor,
    queries: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    split_keys: int,
    scale: float,
    window: int | None,
) -> None:
    """Attention of the newest query rows of each request over its paged keys and values.

    Query row j of a request sees the key positions [max(0, end - window), end) with
    `end = seq_lens - (num_queries - 1 - j)`; a row that sees nothing gives zeros. Positions past `max_seq_len` and
    past the table's last page but one are not read. `seq_lens` is read on the device only.

    Args:
        out: [batch * num_queries, num_heads * head_dim], contiguous, written.
        queries: [batch * num_queries, num_heads, head_dim], any stride but that of the last dimension, which is 1.
        kv: [num_slots, 2, num_kv_heads, head_dim], contiguous, of the queries' dtype; slot = page * page_size + offset.
        page_table: [batch, num_pages + 1] int64; the last column is the scratch page and is not read.
        seq_lens: [batch] int64 keys that the last query row sees.
        max_seq_len: upper bound of `seq_lens` known to the host; sets the launch grid and nothing else.
        split_keys: keys a split, a power of two; see `choose_split_keys`. Prompt chunks are not split.
        window: newest keys that a row sees; None is all of them.
    """
    batch, num_columns = page_table.shape
    num_rows, num_heads, head_dim = queries.shape
    num_queries, num_kv_heads = num_rows // batch, kv.shape[2]
    _assert_shapes(out, queries, kv, page_table)
    channel_tile = max(16, triton.next_power_of_2(head_dim))
    tiles = choose_tiles(num_queries, channel_tile, kv.element_size())
    assert split_keys % tiles.keys == 0
    group = num_heads // num_kv_heads
    num_readable = min(max_seq_len, (num_columns - 1) * page_size)
    if num_queries > MAX_DECODE_QUERIES:
        split_keys = _EVERY_KEY
    num_splits = max(1, triton.cdiv(num_readable, split_keys))
    window = _EVERY_KEY if window is None else window
    split_stride = num_rows * num_heads
    partial, sums, maxima = out, out, out
    if num_splits > 1:
        partial = torch.empty((num_splits, split_stride, head_dim), dtype=torch.float32, device=out.device)
        sums, maxima = torch.empty((2, num_splits, split_stride), dtype=torch.float32, device=out.device).unbind()

    with launch_on(out):
        grid = (batch * triton.cdiv(num_queries * group, tiles.rows), num_kv_heads, num_splits)
        _attend_split[grid](
            *(partial, sums, maxima, queries, kv, page_table, seq_lens, num_queries, num_readable, window),
            *(scale * _LOG2_E, queries.stride(0), queries.stride(1), kv.stride(0), page_table.stride(0), split_stride),
            GROUP=group,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            CHANNEL_TILE=channel_tile,
            PAGE_SIZE=page_size,
            SPLIT_KEYS=split_keys,
            ROW_TILE=tiles.rows,
            KEY_TILE=tiles.keys,
            IS_WHOLE=num_splits == 1,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        if num_splits > 1:
            _merge_splits[(num_rows, num_heads)](
                *(out, partial, sums, maxima, seq_lens, num_queries, num_readable, window, split_stride),
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                CHANNEL_TILE=channel_tile,
                SPLIT_KEYS=split_keys,
                SPLIT_TILE=_MERGED_AT_ONCE,
            )


def _assert_shapes(out: torch.Tensor, queries: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor) -> None:
    """Assert what the kernels take for granted."""
    num_rows, num_heads, head_dim = queries.shape
    num_slots, _, num_kv_heads, _ = kv.shape
    assert_rows_of(out, num_rows, num_heads * head_dim)
    assert_rows_of(kv, num_slots, 2, num_kv_heads, head_dim)
    assert out.is_contiguous() and kv.is_contiguous() and queries.stride(2) == 1 and page_table.stride(1) == 1
    assert num_rows % page_table.shape[0] == 0 and num_heads % num_kv_heads == 0 and queries.dtype == kv.dtype


def paged_attention_reference(
    queries: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute what `paged_attention` computes, in float32: same arguments; returns [batch * num_queries, num_heads *
    head_dim] in the queries' dtype."""
    batch, num_columns = page_table.shape
    num_rows, num_heads, head_dim = queries.shape
    num_queries, num_kv_heads = num_rows // batch, kv.shape[2]
    positions = torch.arange(min(max_seq_len, (num_columns - 1) * page_size), device=kv.device)
    slots = page_table[:, positions // page_size] * page_size + positions % page_size
    behind = torch.arange(num_queries - 1, -1, -1, device=kv.device)
    ends = (seq_lens.unsqueeze(1) - behind).unsqueeze(2)
    is_visible = positions < ends
    if window is not None:
        is_visible &= positions >= ends - window
    # Selection, not multiplication: rows that nobody sees may be NaN.
    is_read = is_visible.any(1)[:, :, None, None, None]
    keys, values = torch.where(is_read, kv[slots], 0).float().unbind(2)
    grouped = queries.float().view(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bqhgd,bkhd->bqhgk", grouped, keys) * scale
    scores = scores.masked_fill(~is_visible[:, :, None, None, :], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)  # a row that sees nothing
    out = torch.einsum("bqhgk,bkhd->bqhgd", weights, values)
    return out.reshape(num_rows, num_heads * head_dim).to(queries.dtype)
