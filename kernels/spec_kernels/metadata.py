"""Attention metadata of one query row a request, moved to the next position in place: what lies between two draft
steps when both are in one CUDA graph (vLLM #46849, SGLang #25539)."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.utils import assert_rows_of, launch_on

_REQUEST_TILE = 128


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


@torch.library.custom_op("spec_kernels::advance_metadata", mutates_args=("positions", "slot_mapping", "seq_lens"))
def advance_metadata(
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> None:
    """Move each request's one query row on by a position.

    Args:
        positions: [batch] int64, written: the new position, at most `max_positions - 1`.
        slot_mapping: [batch] int64, written: its cache slot; past the table's end a slot of the last column's page,
            which is the scratch page.
        seq_lens: [batch] int64, at least 1, written: one more than before.
        page_table: [batch, num_pages + 1] int64.
    """
    batch, num_columns = page_table.shape
    for tensor in (positions, slot_mapping, seq_lens):
        assert_rows_of(tensor, batch)
    with launch_on(seq_lens):
        _advance[(triton.cdiv(batch, _REQUEST_TILE),)](
            *(positions, slot_mapping, seq_lens, page_table, batch, num_columns - 1, max_positions - 1),
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
