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


@operator("build_metadata")
def build_metadata(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute positions, cache slots and lengths of the rows of a forward.

    Returns the positions [batch * num_queries], clamped to 0 .. `max_positions - 1`; the cache slots [batch *
    num_queries], which are those of the last column's page, the scratch page, for positions outside the table; and
    `seq_lens`, at least 1.

    Args:
        positions: [batch, num_queries] int64, contiguous.
        seq_lens: [batch] int64.
        page_table: [batch, num_pages + 1] int64.
    """
    batch, num_queries = positions.shape
    num_rows = batch * num_queries
    assert_rows_of(seq_lens, batch)
    assert positions.is_contiguous() and page_table.shape[0] == batch
    row_positions, slot_mapping = (positions.new_empty(num_rows) for _ in range(2))
    lens = torch.empty_like(seq_lens)
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
    return row_positions, slot_mapping, lens


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
