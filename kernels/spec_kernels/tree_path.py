"""Turns the accepted path of a tree into a chain: moves its KV, in all layers, and its features to where a chain has
them.

In torch this takes a gather and a scatter for each cache, and operators to find the slots, over all columns. Here cache
rows that are already in place, such as those of a chain, are not moved.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_NUMBERS = 4096
"""The most elements that a program moves, for paths of up to 16 columns."""


@triton.jit(do_not_specialize=["num_columns", "num_rows", "num_kv_parts", "num_kv_chunks"])
def _move_path(
    kv_ptr: tl.tensor,
    moved_ptr: tl.tensor,
    features_ptr: tl.tensor,
    path_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_rows: tl.tensor,
    num_kv_parts: tl.tensor,
    num_kv_chunks: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    moved_stride: tl.tensor,
    features_stride: tl.tensor,
    last_column: tl.tensor,
    page_table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Moves some channels of one layer's KV for one request; the programs after the last layer's move features.

    The destination of a row may be the place of a later row, so all rows are read before any is written. Programs share
    no elements, so none waits for another.
    """
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, COLUMN_TILE)
    is_column = columns < num_columns
    path = tl.load(path_ptr + request * num_columns + columns, mask=is_column, other=0)
    if part < num_kv_parts:
        channels = part % num_kv_chunks * CHUNK + tl.arange(0, CHUNK)
        layer_ptr = kv_ptr + (part // num_kv_chunks).to(tl.int64) * layer_stride
        start = tl.load(kv_lens_ptr + request)
        table_ptr = page_table_ptr + request * page_table_stride
        sources, targets = start + path, start + columns
        is_moved = is_column & (path != columns)
        source_pages = tl.load(table_ptr + tl.minimum(sources // PAGE_SIZE, last_column), mask=is_moved, other=0)
        target_pages = tl.load(table_ptr + tl.minimum(targets // PAGE_SIZE, last_column), mask=is_moved, other=0)
        source_slots = source_pages * PAGE_SIZE + sources % PAGE_SIZE
        target_slots = target_pages * PAGE_SIZE + targets % PAGE_SIZE
        mask = is_moved[:, None] & (channels < slot_stride)[None, :]
        numbers = tl.load(layer_ptr + source_slots[:, None] * slot_stride + channels[None, :], mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(layer_ptr + target_slots[:, None] * slot_stride + channels[None, :], numbers, mask=mask)
    else:
        channels = (part - num_kv_parts) * CHUNK + tl.arange(0, CHUNK)
        mask = is_column[:, None] & (channels < moved_stride)[None, :]
        rows = request * num_rows + path
        numbers = tl.load(features_ptr + rows[:, None] * features_stride + channels[None, :], mask=mask, other=0.0)
        places = request * num_columns + columns
        tl.store(moved_ptr + places[:, None] * moved_stride + channels[None, :], numbers, mask=mask)


@operator("move_path", mutates_args=("caches", "moved"))
def move_path(
    caches: list[torch.Tensor],
    moved: torch.Tensor | None,
    features: torch.Tensor | None,
    path: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    """Do what `move_path_reference` does, in one launch for each of `caches`; the first one moves the features too.

    Args:
        caches: each contiguous.
        moved: contiguous, written in full.
        features: of any row stride.
        path: int64, contiguous; on the path, the row in a column has at least the column's index.
    """
    batch, num_columns = path.shape
    assert_rows_of(kv_lens, batch)
    assert path.is_contiguous() and page_table.shape[0] == batch and caches
    column_tile = triton.next_power_of_2(num_columns)
    chunk = max(_NUMBERS // column_tile, 256)
    with launch_on(path):
        for index, cache in enumerate(caches):
            assert cache.is_contiguous()
            kv_width = cache[0, 0].numel()
            num_chunks = triton.cdiv(kv_width, chunk)
            num_parts, rows, places, width = cache.shape[0] * num_chunks, 0, cache, 0
            if index == 0 and moved is not None:
                assert features is not None and moved.is_contiguous()
                rows, places, width = features.shape[0] // batch, moved, moved.shape[1]
                assert_rows_of(features, batch * rows, width)
                assert_rows_of(moved, batch * num_columns, width)
            read = features if width else cache
            assert read is not None
            _move_path[(batch, num_parts + triton.cdiv(width, chunk))](
                cache,
                places,
                read,
                path,
                kv_lens,
                page_table,
                num_columns,
                rows,
                num_parts,
                num_chunks,
                kv_width,
                cache.stride(0),
                width,
                read.stride(0),
                page_table.shape[1] - 1,
                page_table.stride(0),
                PAGE_SIZE=page_size,
                COLUMN_TILE=column_tile,
                CHUNK=chunk,
            )
