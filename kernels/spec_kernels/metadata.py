"""Builds attention metadata for the rows of a forward. Also advances, in place, the metadata of one query row for each
request.

The second kernel runs between two draft steps that are in one CUDA graph (vLLM #46849, SGLang #25539).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_REQUEST_TILE = 128


@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def _build(
    row_positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_queries: tl.tensor,
    last_column: tl.tensor,
    last_position: tl.tensor,
    page_table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    request = row // num_queries
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    # As in torch, division floors, and negative positions use the scratch page, like those past the end.
    column = tl.where(position < 0, last_column, tl.minimum(position // PAGE_SIZE, last_column))
    page = tl.load(page_table_ptr + request * page_table_stride + column, mask=is_row, other=0)
    offset = (position % PAGE_SIZE + PAGE_SIZE) % PAGE_SIZE
    tl.store(slot_mapping_ptr + row, page * PAGE_SIZE + offset, mask=is_row)
    tl.store(row_positions_ptr + row, tl.minimum(tl.maximum(position, 0), last_position), mask=is_row)
    seq_len = tl.load(seq_lens_ptr + request, mask=is_row, other=1)
    tl.store(lens_ptr + request, tl.maximum(seq_len, 1), mask=is_row & (row % num_queries == 0))


@operator("build_metadata", mutates_args=("row_positions", "slot_mapping", "lens"))
def build_metadata(
    row_positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> None:
    """Compute positions, cache slots and lengths of the rows of a forward.

    Args:
        row_positions: [batch * num_queries] int64, written: the positions, clamped to 0 .. `max_positions - 1`.
        slot_mapping: [batch * num_queries] int64, written: the cache slots. Positions outside the table get slots of
            the last column's page, which is the scratch page.
        lens: [batch] int64, written: `seq_lens`, at least 1.
        positions: [batch, num_queries] int64, contiguous.
        seq_lens: [batch] int64.
        page_table: [batch, num_pages + 1] int64.
    """
    batch, num_queries = positions.shape
    num_rows = batch * num_queries
    for tensor in (row_positions, slot_mapping):
        assert_rows_of(tensor, num_rows)
    for tensor in (lens, seq_lens):
        assert_rows_of(tensor, batch)
    assert positions.is_contiguous() and page_table.shape[0] == batch
    with launch_on(seq_lens):
        _build[(triton.cdiv(num_rows, _REQUEST_TILE),)](
            row_positions,
            slot_mapping,
            lens,
            positions,
            seq_lens,
            page_table,
            num_rows,
            num_queries,
            page_table.shape[1] - 1,
            max_positions - 1,
            page_table.stride(0),
            PAGE_SIZE=page_size,
            ROW_TILE=_REQUEST_TILE,
        )


def build_metadata_reference(
    row_positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> None:
    """Does what `build_metadata` does, in torch."""
    last_column = page_table.shape[1] - 1
    columns = positions.div(page_size, rounding_mode="floor").clamp(max=last_column)
    columns = torch.where(columns < 0, last_column, columns)
    slot_mapping.copy_((page_table.gather(1, columns) * page_size + positions.remainder(page_size)).flatten())
    row_positions.copy_(positions.clamp(0, max_positions - 1).flatten())
    lens.copy_(seq_lens.clamp(min=1))


@triton.jit(do_not_specialize=["batch"])
def _advance(
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    batch: tl.tensor,
    last_column: tl.tensor,
    last_position: tl.tensor,
    page_table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    REQUEST_TILE: tl.constexpr,
) -> None:
    requests = tl.program_id(0) * REQUEST_TILE + tl.arange(0, REQUEST_TILE)
    is_request = requests < batch
    position = tl.load(seq_lens_ptr + requests, mask=is_request, other=1)
    column = tl.minimum(position // PAGE_SIZE, last_column)
    page = tl.load(page_table_ptr + requests * page_table_stride + column, mask=is_request, other=0)
    tl.store(slot_mapping_ptr + requests, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_request)
    tl.store(positions_ptr + requests, tl.minimum(position, last_position), mask=is_request)
    tl.store(seq_lens_ptr + requests, position + 1, mask=is_request)


@operator("advance_metadata", mutates_args=("positions", "slot_mapping", "seq_lens"))
def advance_metadata(
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> None:
    """Advance each request's single query row by one position.

    Args:
        positions: [batch] int64, written: the new position, at most `max_positions - 1`.
        slot_mapping: [batch] int64, written: its cache slot. A position past the table's end gets a slot of the last
            column's page, which is the scratch page.
        seq_lens: [batch] int64, at least 1, written: one more than before.
        page_table: [batch, num_pages + 1] int64.
    """
    batch, num_columns = page_table.shape
    for tensor in (positions, slot_mapping, seq_lens):
        assert_rows_of(tensor, batch)
    with launch_on(seq_lens):
        _advance[(triton.cdiv(batch, _REQUEST_TILE),)](
            positions,
            slot_mapping,
            seq_lens,
            page_table,
            batch,
            num_columns - 1,
            max_positions - 1,
            page_table.stride(0),
            PAGE_SIZE=page_size,
            REQUEST_TILE=_REQUEST_TILE,
        )


def advance_metadata_reference(
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> None:
    """Does what `advance_metadata` does, in torch."""
    columns = (seq_lens // page_size).clamp(max=page_table.shape[1] - 1)
    pages = page_table.gather(1, columns.unsqueeze(1)).squeeze(1)
    slot_mapping.copy_(pages * page_size + seq_lens % page_size)
    positions.copy_(seq_lens.clamp(max=max_positions - 1))
    seq_lens.add_(1)
