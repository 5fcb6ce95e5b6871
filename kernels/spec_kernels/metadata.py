"""Builds attention metadata for the rows of a forward. Also advances, in place, the metadata of one query row for each
request.

The latter runs between two draft steps that are in one CUDA graph (vLLM #46849, SGLang #25539).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_ROW_TILE = 128


@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def _place(
    row_positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    positions_ptr: tl.tensor | None,
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
    """Places ROW_TILE rows at their positions; without positions the one row of each request, after its last key."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    request = row // num_queries
    seq_len = tl.load(seq_lens_ptr + request, mask=is_row, other=1)
    if positions_ptr is None:
        position = seq_len
        seq_len += 1
    else:
        position = tl.load(positions_ptr + row, mask=is_row, other=0)
    # As in torch, division floors, and negative positions use the scratch page, like those past the end.
    column = tl.where(position < 0, last_column, tl.minimum(position // PAGE_SIZE, last_column))
    page = tl.load(page_table_ptr + request * page_table_stride + column, mask=is_row, other=0)
    offset = (position % PAGE_SIZE + PAGE_SIZE) % PAGE_SIZE
    tl.store(slot_mapping_ptr + row, page * PAGE_SIZE + offset, mask=is_row)
    tl.store(row_positions_ptr + row, tl.minimum(tl.maximum(position, 0), last_position), mask=is_row)
    tl.store(lens_ptr + request, tl.maximum(seq_len, 1), mask=is_row & (row % num_queries == 0))


def _launch(
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor | None,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> None:
    """Write the positions, cache slots and lengths of rows to `places`, the last of which may be `seq_lens`."""
    num_rows = places[0].shape[0]
    assert_rows_of(seq_lens, page_table.shape[0])
    with launch_on(seq_lens):
        _place[(triton.cdiv(num_rows, _ROW_TILE),)](
            *places,
            positions,
            seq_lens,
            page_table,
            num_rows,
            1 if positions is None else positions.shape[1],
            page_table.shape[1] - 1,
            max_positions - 1,
            page_table.stride(0),
            PAGE_SIZE=page_size,
            ROW_TILE=_ROW_TILE,
        )


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
    assert positions.is_contiguous() and page_table.shape[0] == positions.shape[0]
    row_positions, slot_mapping = (positions.new_empty(positions.numel()) for _ in range(2))
    places = row_positions, slot_mapping, torch.empty_like(seq_lens)
    _launch(places, positions, seq_lens, page_table, page_size, max_positions)
    return places


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
    for tensor in (positions, slot_mapping):
        assert_rows_of(tensor, page_table.shape[0])
    _launch((positions, slot_mapping, seq_lens), None, seq_lens, page_table, page_size, max_positions)
