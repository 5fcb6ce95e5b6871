"""Attention of a few query rows a request, split over the keys (Flash-Decoding, Dao et al. 2023) where rows are few."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.online_softmax import add_keys_across, divisor, key_slots, merge


@triton.jit
def _visible_bits(visible_ptr: tl.tensor, rows: tl.tensor, is_row: tl.tensor, num_tail: tl.tensor) -> tl.tensor:
    """Packs which of a tree's keys each row sees: a number a row, as lengths are, leaves the layout of scores alone."""
    numbers = tl.arange(0, 64)
    is_seen = is_row[:, None] & (numbers < num_tail)[None, :]
    visible = tl.load(visible_ptr + (rows * num_tail)[:, None] + numbers[None, :], mask=is_seen, other=0) != 0
    return tl.sum(visible.to(tl.int64) << numbers.to(tl.int64)[None, :], 1)


@triton.jit(do_not_specialize=["num_queries", "num_tail", "num_readable", "window", "split_stride", "split_keys"])
def attend_split(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    key_depths_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_tail: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    page_table_stride: tl.tensor,
    split_stride: tl.tensor,
    split_keys: tl.tensor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_TREE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> None:
    """Attends one row tile over the keys of one split, or of all of them, one after the other, when IS_WHOLE."""
    tiles_per_request = tl.cdiv(num_queries * GROUP, ROW_TILE)
    request = tl.program_id(0) // tiles_per_request
    first_row = tl.program_id(0) % tiles_per_request * ROW_TILE
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    rows = first_row + tl.arange(0, ROW_TILE)
    query = rows // GROUP
    is_row = query < num_queries
    out_row = (request * num_queries + query).to(tl.int64)

    # The keys that a row sees: a chain's up to itself; a tree's those of the prefix, and those that the tree says.
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    if IS_TREE:
        prefix_len = seq_len - num_tail
        depths = tl.load(depths_ptr + out_row, mask=is_row, other=0).to(tl.int32)
        visible_bits = _visible_bits(visible_ptr, out_row, is_row, num_tail)
        start = prefix_len + depths + 1 - window
        end = tl.full((ROW_TILE,), 0, tl.int32) + prefix_len
        lowest = tl.maximum(prefix_len + 1 - window, 0)
        highest = tl.minimum(seq_len, num_readable)
    else:
        prefix_len = seq_len - num_queries
        start = prefix_len + 1 + query - window
        end = prefix_len + 1 + query
        last_query = tl.minimum((first_row + ROW_TILE - 1) // GROUP, num_queries - 1)
        lowest = tl.maximum(prefix_len + 1 + first_row // GROUP - window, 0)
        highest = tl.minimum(prefix_len + 1 + last_query, num_readable)
    low, high = lowest, highest
    if not IS_WHOLE:
        low = tl.maximum(lowest, split * split_keys)
        high = tl.minimum(highest, (split + 1) * split_keys)
        # Nobody reads what this split would write.
        if low >= high:
            return

    channels = tl.arange(0, CHANNEL_TILE)
    is_channel = channels < HEAD_DIM
    head = kv_head * GROUP + rows % GROUP
    is_entry = is_channel[:, None] & is_row[None, :]
    query_ptrs = queries_ptr + (out_row * query_row_stride + head * query_head_stride)[None, :] + channels[:, None]
    queries = tl.load(query_ptrs, mask=is_entry, other=0.0)
    pages_ptr = page_table_ptr + request * page_table_stride

    total_maxima = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    total_sums = tl.zeros((ROW_TILE,), tl.float32)
    total_acc = tl.zeros((CHANNEL_TILE, ROW_TILE), tl.float32)
    maxima, sums, acc = total_maxima, total_sums, total_acc
    for first_key in tl.range(low // KEY_TILE * KEY_TILE, high, KEY_TILE, num_stages=STAGES):
        keys = first_key + tl.arange(0, KEY_TILE)
        # Keys outside are never loaded: what lies there may be NaN.
        is_key = (keys >= low) & (keys < high)
        slots = key_slots(pages_ptr, keys, low, high, PAGE_SIZE)
        key_ptrs = kv_ptr + (slots * slot_stride + kv_head * HEAD_DIM)[:, None] + channels[None, :]
        is_cell = is_key[:, None] & is_channel[None, :]
        key_rows = tl.load(key_ptrs, mask=is_cell, other=0.0)
        value_rows = tl.load(key_ptrs + NUM_KV_HEADS * HEAD_DIM, mask=is_cell, other=0.0)

        scores = tl.dot(key_rows, queries, input_precision="ieee") * scale
        is_visible = (keys[:, None] >= start[None, :]) & (keys[:, None] < end[None, :])
        if IS_TREE:
            numbers = keys - prefix_len
            is_tail = (numbers >= 0) & (numbers < num_tail)
            key_depths = tl.load(key_depths_ptr + request * num_tail + numbers, mask=is_tail, other=0).to(tl.int32)
            in_tree = (visible_bits[None, :] >> tl.where(is_tail, numbers, 0).to(tl.int64)[:, None]) & 1 != 0
            in_tree &= key_depths[:, None] > (depths - window)[None, :]
            is_visible = tl.where(is_tail[:, None], in_tree, is_visible)
        scores = tl.where(is_visible & is_key[:, None], scores, float("-inf"))
        if IS_WHOLE:
            # Where a split begins, the one before is merged; elsewhere a row that saw nothing, which changes nothing.
            is_first = first_key % split_keys == 0
            done = tl.where(is_first, maxima, float("-inf"))
            total_maxima, total_sums, total_acc = merge(total_maxima, total_sums, total_acc, done, sums, acc, 0)
            maxima = tl.where(is_first, float("-inf"), maxima)
        maxima, sums, acc = add_keys_across(maxima, sums, acc, scores, value_rows)

    out_head = out_row * (NUM_KV_HEADS * GROUP) + head
    if IS_WHOLE:
        total_maxima, total_sums, total_acc = merge(total_maxima, total_sums, total_acc, maxima, sums, acc, 0)
        out = total_acc / divisor(total_sums)[None, :]
        tl.store(
            out_ptr + out_head[None, :] * HEAD_DIM + channels[:, None], out.to(out_ptr.dtype.element_ty), mask=is_entry
        )
    else:
        out_head += split.to(tl.int64) * split_stride
        tl.store(partial_ptr + out_head[None, :] * HEAD_DIM + channels[:, None], acc, mask=is_entry)
        tl.store(sums_ptr + out_head, sums, mask=is_row)
        tl.store(maxima_ptr + out_head, maxima, mask=is_row)
