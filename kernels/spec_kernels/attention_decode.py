"""Attention of a few query rows for each request. If row tiles are too few to fill the GPU, several programs share the
keys of each (Flash-Decoding, Dao et al. 2023)."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.attention_tree import tree_keys, tree_slots, tree_tile
from spec_kernels.early import wait_for_inputs
from spec_kernels.narrow_kv import in_two_parts, load_powers, weigh_narrow_keys, widened_words
from spec_kernels.online_softmax import divisor, key_slots, merge, weigh_keys, with_sink


@triton.jit(
    do_not_specialize=[
        *("num_queries", "num_tail", "path_len", "num_own", "num_shared", "num_splits", "num_readable", "window"),
        *("split_stride", "split_keys"),
    ]
)
def attend_split(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    powers_ptr: tl.tensor | None,
    page_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    path_slots_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_queries: tl.tensor,
    num_tail: tl.tensor,
    path_len: tl.tensor,
    num_own: tl.tensor,
    num_shared: tl.tensor,
    num_splits: tl.tensor,
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
    HAS_SINKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Attends one row tile over the keys of one split.

    If IS_WHOLE, a program of a chain takes all splits one after another. So does a tree's program of shared splits.

    All rows of a tree share the splits before its root's. From the root's split on, each query row has its own
    programs. A path's keys count as consecutive, so splits and tiles cut them as they cut a chain. Therefore a row's
    sums equal those of plain decoding.
    """
    kv_head = tl.program_id(1)
    if IS_TREE:
        is_own, request, first_row, end_row, split = tree_tile(
            tl.program_id(0), num_own, num_shared, num_splits, num_queries, GROUP, ROW_TILE
        )
    else:
        tiles_per_request = tl.cdiv(num_queries * GROUP, ROW_TILE)
        request = tl.program_id(0) // tiles_per_request
        first_row = tl.program_id(0) % tiles_per_request * ROW_TILE
        split = tl.program_id(2)
    rows = first_row + tl.arange(0, ROW_TILE)
    query = rows // GROUP
    is_row = rows < end_row if IS_TREE else query < num_queries
    out_row = (request * num_queries + query).to(tl.int64)

    # A tile reads one range of keys, which covers those of all its rows. In a chain each row has its own start and end
    # in that range. No kernel of this forward writes seq_lens, so they may be read before the wait.
    seq_len = tl.load(seq_lens_ptr + request, cache_modifier=".cg").to(tl.int32)
    wait_for_inputs(EARLY)
    if IS_TREE:
        prefix_len = seq_len - num_tail
        own_row = (request * num_queries + first_row // GROUP).to(tl.int64)
        path_ptr = path_slots_ptr + own_row * path_len
        own_depth = tl.load(depths_ptr + own_row).to(tl.int32)
        low, high, entry = tree_keys(is_own, split, prefix_len, own_depth, num_readable, window, split_keys, IS_WHOLE)
        if low >= high:
            return
        # A row's own program ends at the row, and a shared one before the root. So no row needs a mask for its end, but
        # each needs one for the start of its window.
        start = prefix_len + 1 - window + tl.load(depths_ptr + out_row, mask=is_row, other=0).to(tl.int32)
    else:
        last_query = tl.minimum((first_row + ROW_TILE - 1) // GROUP, num_queries - 1)
        prefix_len = seq_len - num_queries
        start = prefix_len + 1 + query - window
        end = prefix_len + 1 + query
        low = tl.maximum(prefix_len + 1 + first_row // GROUP - window, 0)
        high = tl.minimum(prefix_len + 1 + last_query, num_readable)
        entry = split
        if not IS_WHOLE:
            low = tl.maximum(low, split * split_keys)
            high = tl.minimum(high, (split + 1) * split_keys)
            # The output of this split would not be read.
            if low >= high:
                return

    channels = tl.arange(0, CHANNEL_TILE)
    is_channel = channels < HEAD_DIM
    head = kv_head * GROUP + rows % GROUP
    is_entry = is_channel[:, None] & is_row[None, :]
    query_ptrs = queries_ptr + (out_row * query_row_stride + head * query_head_stride)[None, :] + channels[:, None]
    queries = tl.load(query_ptrs, mask=is_entry, other=0.0)
    pages_ptr = page_table_ptr + request * page_table_stride
    # Values in e4m3 are read in words, each of an even channel and the odd one behind: the tensor cores take no turned
    # numbers of 8 bits, and only those of 16 are turned on their way to registers. Products of 8 bits sum 32 channels.
    # With heads over 256 Triton widens both of their operands in registers.
    IS_NARROW: tl.constexpr = powers_ptr is not None
    IS_NATIVE: tl.constexpr = IS_NARROW and queries.dtype != tl.float32 and CHANNEL_TILE >= 32
    HALF_FACTOR: tl.constexpr = 2.0**60 if queries.dtype == tl.bfloat16 else 1.0
    PART: tl.constexpr = CHANNEL_TILE // 2 if IS_NARROW else CHANNEL_TILE
    if IS_NARROW:
        first, second, ratio, power = in_two_parts(queries, kv_ptr.dtype.element_ty)
        words_ptr = (kv_ptr + (NUM_KV_HEADS + kv_head) * HEAD_DIM).to(tl.pointer_type(tl.int16))
        words_of_row = tl.arange(0, PART)[:, None]

    total_maxima = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    total_sums = tl.zeros((ROW_TILE,), tl.float32)
    total_acc = tl.zeros((PART, ROW_TILE), tl.float32)
    total_odd = total_acc
    maxima, sums, acc, odd = total_maxima, total_sums, total_acc, total_odd
    for first_key in tl.range(low // KEY_TILE * KEY_TILE, high, KEY_TILE, num_stages=STAGES):
        keys = first_key + tl.arange(0, KEY_TILE)
        is_key = (keys >= low) & (keys < high)
        if IS_TREE:
            slots = tree_slots(path_ptr, pages_ptr, keys, prefix_len, is_key, PAGE_SIZE)
        else:
            slots = key_slots(pages_ptr, keys, low, high, PAGE_SIZE)
        # Keys out of range are never loaded, since they may be NaN.
        key_ptrs = kv_ptr + (slots * slot_stride + kv_head * HEAD_DIM)[:, None] + channels[None, :]
        is_cell = is_key[:, None] & is_channel[None, :]
        key_rows = tl.load(key_ptrs, mask=is_cell, other=0.0)
        if IS_NARROW:
            word_ptrs = words_ptr + (slots * (slot_stride // 2))[None, :] + words_of_row
            words = tl.load(word_ptrs, mask=is_key[None, :] & (words_of_row < HEAD_DIM // 2), other=0)
        else:
            value_rows = tl.load(key_ptrs + NUM_KV_HEADS * HEAD_DIM, mask=is_cell, other=0.0)
        if IS_NATIVE:
            scores = tl.dot(key_rows, first, tl.dot(key_rows, second) * ratio[None, :]) * (power * scale)[None, :]
        else:
            scores = tl.dot(key_rows.to(queries.dtype), queries, input_precision="ieee") * scale
        if IS_NARROW:
            key_powers, powers = load_powers(powers_ptr, slots, kv_head, is_key, NUM_KV_HEADS)
            scores *= key_powers[:, None]
        is_visible = keys[:, None] >= start[None, :]
        if not IS_TREE:
            is_visible = is_visible & (keys[:, None] < end[None, :])
        scores = tl.where(is_visible & is_key[:, None], scores, float("-inf"))
        if IS_WHOLE:
            # At the start of a split the previous one is merged. Elsewhere an empty one is merged, which changes
            # nothing.
            is_first = first_key % split_keys == 0
            done = tl.where(is_first, maxima, float("-inf"))
            if IS_NARROW:
                _, _, total_odd = merge(total_maxima, total_sums, total_odd, done, sums, odd, 0)
            total_maxima, total_sums, total_acc = merge(total_maxima, total_sums, total_acc, done, sums, acc, 0)
            maxima = tl.where(is_first, float("-inf"), maxima)
        if IS_NARROW:
            # In bfloat16 weights make good half of what values are too small by, and the sums the rest.
            powers *= HALF_FACTOR
            maxima, sums, weights, decay = weigh_narrow_keys(maxima, sums, scores, powers, 0, queries.dtype)
            values, odd_values = widened_words(words, queries.dtype)
            odd = tl.dot(odd_values, weights.to(queries.dtype), odd * decay[None, :], input_precision="ieee")
        else:
            maxima, sums, weights, decay = weigh_keys(maxima, sums, scores, 0)
            values = tl.trans(value_rows)
        acc = tl.dot(values, weights.to(queries.dtype), acc * decay[None, :], input_precision="ieee")

    out_head = out_row * (NUM_KV_HEADS * GROUP) + head
    if IS_WHOLE:
        if IS_NARROW:
            _, _, odd = merge(total_maxima, total_sums, total_odd, maxima, sums, odd, 0)
        maxima, sums, acc = merge(total_maxima, total_sums, total_acc, maxima, sums, acc, 0)
    if IS_NARROW:
        acc = tl.reshape(tl.permute(tl.join(acc, odd), (2, 0, 1)), (CHANNEL_TILE, ROW_TILE)) * HALF_FACTOR
        channels = channels % PART * 2 + channels // PART
        is_entry = (channels < HEAD_DIM)[:, None] & is_row[None, :]
    if IS_WHOLE and not IS_TREE:
        if HAS_SINKS:
            sums = with_sink(maxima, sums, sinks_ptr, head, is_row)
        out = acc / divisor(sums)[None, :]
        tl.store(
            out_ptr + out_head[None, :] * HEAD_DIM + channels[:, None], out.to(out_ptr.dtype.element_ty), mask=is_entry
        )
    else:
        out_head += entry.to(tl.int64) * split_stride
        tl.store(partial_ptr + out_head[None, :] * HEAD_DIM + channels[:, None], acc, mask=is_entry)
        tl.store(sums_ptr + out_head, sums, mask=is_row)
        tl.store(maxima_ptr + out_head, maxima, mask=is_row)
