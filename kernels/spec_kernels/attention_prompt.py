"""Attention of a prompt chunk. Keys are read from their pages without being gathered first.

In 16-bit types tiles have many rows, which suits the tensor cores. Without a window, the key tiles that all rows of a
tile see whole come first, without a mask. The other keys follow with one. With a window all keys are masked. Source:
FlashAttention-2 (Dao 2023).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.narrow_kv import load_powers, weigh_narrow_keys
from spec_kernels.online_softmax import divisor, key_slots, weigh_keys, with_sink


@triton.jit(do_not_specialize=["num_queries", "num_readable", "window"])
def attend_chunk(
    out_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    powers_ptr: tl.tensor | None,
    page_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    page_table_stride: tl.tensor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Attends ROW_TILE query rows of one head over all keys that they see."""
    # The tiles that see the most keys start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    query = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = query < num_queries
    channels = tl.arange(0, CHANNEL_TILE)
    is_channel = (channels < HEAD_DIM)[None, :]
    out_row = (request * num_queries + query).to(tl.int64)
    query_ptrs = queries_ptr + (out_row * query_row_stride + head * query_head_stride)[:, None] + channels[None, :]
    queries = tl.load(query_ptrs, mask=is_row[:, None] & is_channel, other=0.0)

    # The keys of the tile's first query start earliest, and those of the last query end latest.
    first_end = tl.load(seq_lens_ptr + request).to(tl.int32) - (num_queries - 1)
    last_query = tl.minimum(tile * ROW_TILE + ROW_TILE, num_queries) - 1
    end = first_end + query
    start = end - window
    low = tl.maximum(first_end + tile * ROW_TILE - window, 0)
    high = tl.minimum(first_end + last_query, num_readable)

    maxima = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    sums = tl.zeros((ROW_TILE,), tl.float32)
    acc = tl.zeros((ROW_TILE, CHANNEL_TILE), tl.float32)
    pages_ptr = page_table_ptr + request * page_table_stride
    masked_from = low
    if not IS_WINDOWED:
        # Every row of the tile sees all keys up to the first row's last key.
        masked_from = tl.maximum(tl.minimum(first_end + tile * ROW_TILE, num_readable), 0) // KEY_TILE * KEY_TILE
    kv_ptr += head // GROUP * HEAD_DIM
    for is_masked in tl.static_range(1 if IS_WINDOWED else 0, 2):
        # Unless masked, all rows see all keys of these tiles.
        first, last = masked_from if is_masked else 0, high if is_masked else masked_from
        for first_key in tl.range(first // KEY_TILE * KEY_TILE, last, KEY_TILE, num_stages=STAGES):
            keys = first_key + tl.arange(0, KEY_TILE)
            slots = key_slots(pages_ptr, keys, first, last, PAGE_SIZE)
            is_key = (keys >= first) & (keys < last)
            is_entry = is_channel
            if is_masked:
                is_entry = is_key[:, None] & is_channel
            key_ptrs = kv_ptr + (slots * slot_stride)[:, None] + channels[None, :]
            key_rows = tl.load(key_ptrs, mask=is_entry, other=0.0).to(queries.dtype)
            value_rows = tl.load(key_ptrs + NUM_KV_HEADS * HEAD_DIM, mask=is_entry, other=0.0).to(queries.dtype)
            scores = tl.dot(queries, tl.trans(key_rows), input_precision="ieee") * scale
            if powers_ptr is not None:
                key_powers, powers = load_powers(powers_ptr, slots, head // GROUP, is_key, NUM_KV_HEADS)
                scores *= key_powers[None, :]
            if is_masked:
                is_visible = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
                scores = tl.where(is_visible & is_key[None, :], scores, float("-inf"))
            if powers_ptr is not None:
                maxima, sums, weights, decay = weigh_narrow_keys(maxima, sums, scores, powers, 1, queries.dtype)
            else:
                maxima, sums, weights, decay = weigh_keys(maxima, sums, scores, 1)
            acc = tl.dot(weights.to(value_rows.dtype), value_rows, acc * decay[:, None], input_precision="ieee")
    if HAS_SINKS:
        sums = with_sink(maxima, sums, sinks_ptr, head + query * 0, is_row)
    out_ptrs = out_ptr + (out_row * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + channels[None, :]
    out = (acc / divisor(sums)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=is_row[:, None] & is_channel)
