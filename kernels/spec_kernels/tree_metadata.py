"""Metadata of a draft tree's rows: their positions, and the slots of the keys that each sees.

It is computed once for all layers, in each round and in each level of drafting. The keys are found by following
parents, where EAGLE-2 (arXiv 2406.16858) uses a mask."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on


@triton.jit
def _slots(
    pages_ptr: tl.tensor, positions: tl.tensor, last_column: tl.tensor, is_row: tl.tensor, PAGE_SIZE: tl.constexpr
) -> tl.tensor:
    """Returns the cache slots of positions of a request; positions past the table's end use its last column's page."""
    pages = tl.load(pages_ptr + tl.minimum(positions // PAGE_SIZE, last_column), mask=is_row, other=0)
    return pages * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit(do_not_specialize=["num_rows", "path_len", "last_column", "last_position"])
def _place_tree(
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    path_slots_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    prefix_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    num_rows: tl.tensor,
    path_len: tl.tensor,
    last_column: tl.tensor,
    last_position: tl.tensor,
    page_table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> None:
    """Climbs twice from every row of a request: first to find its depth, then to write each key's slot into its
    path."""
    request = tl.program_id(0)
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    parents_ptr += request * num_rows
    pages_ptr = page_table_ptr + request * page_table_stride
    prefix_len = tl.load(prefix_lens_ptr + request)
    at = rows.to(tl.int64)
    depths = tl.zeros_like(at)
    for _ in range(path_len - 1):
        above = tl.load(parents_ptr + at, mask=is_row, other=0)
        depths += (above != at).to(tl.int64)
        at = above
    out_rows = request * num_rows + rows
    tl.store(depths_ptr + out_rows, depths, mask=is_row)
    tl.store(positions_ptr + out_rows, tl.minimum(prefix_len + depths, last_position), mask=is_row)
    tl.store(seq_lens_ptr + request, prefix_len + num_rows)
    at = rows.to(tl.int64)
    slots = _slots(pages_ptr, prefix_len + at, last_column, is_row, PAGE_SIZE)
    tl.store(slot_mapping_ptr + out_rows, slots, mask=is_row)
    for step in range(path_len):
        is_place = is_row & (step <= depths)
        tl.store(path_slots_ptr + out_rows * path_len + depths - step, slots, mask=is_place)
        at = tl.load(parents_ptr + at, mask=is_row, other=0)
        slots = _slots(pages_ptr, prefix_len + at, last_column, is_row, PAGE_SIZE)


@operator("place_tree")
def place_tree(
    parents: torch.Tensor,
    depth: int,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_positions: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the metadata of the rows of trees after their prefixes; all tensors are int64.

    Returns:
        Positions [batch * N]: prefix + depth, at most `max_positions - 1`.
        The cache slots [batch * N] of the positions prefix + row. Positions past the table's end get slots of the last
        column's page, which is the scratch page.
        Lengths [batch]: prefix + N.
        Depths [batch, N]: the number of steps up from each row to a row that is its own parent.
        The slots [batch, N, depth + 1] of a row's ancestors, from the root on, then its own; the rest is not written.

    Args:
        parents: [batch, N], contiguous; no row is more than `depth` steps below the root.
        prefix_lens: [batch].
        page_table: [batch, num_pages + 1].
    """
    (batch, num_rows), path_len = parents.shape, depth + 1
    assert parents.is_contiguous()
    assert_rows_of(prefix_lens, batch)
    places = _empty_places(parents, path_len)
    with launch_on(parents):
        _place_tree[(batch,)](
            *places,
            parents,
            prefix_lens,
            page_table,
            num_rows,
            path_len,
            page_table.shape[1] - 1,
            max_positions - 1,
            page_table.stride(0),
            PAGE_SIZE=page_size,
            ROW_TILE=triton.next_power_of_2(num_rows),
            num_warps=1,
        )
    return places


@triton.jit(
    do_not_specialize=[
        *("width", "width_before", "path_len", "num_before", "last_column", "last_position"),
        *("came_from_stride", "came_from_step"),
    ]
)
def _place_branches(
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    path_slots_ptr: tl.tensor,
    slots_before_ptr: tl.tensor,
    came_from_ptr: tl.tensor,
    prefix_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    width: tl.tensor,
    width_before: tl.tensor,
    path_len: tl.tensor,
    num_before: tl.tensor,
    last_column: tl.tensor,
    last_position: tl.tensor,
    page_table_stride: tl.tensor,
    came_from_stride: tl.tensor,
    came_from_step: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    PLACE_TILE: tl.constexpr,
) -> None:
    """Copies to each branch of a request its parent branch's path, followed by its own slot."""
    request = tl.program_id(0)
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < width
    out_rows = request * width + rows
    prefix_len = tl.load(prefix_lens_ptr + request)
    depth = path_len - 1
    pages_ptr = page_table_ptr + request * page_table_stride
    slots = _slots(pages_ptr, prefix_len + num_before + rows, last_column, is_row, PAGE_SIZE)
    tl.store(slot_mapping_ptr + out_rows, slots, mask=is_row)
    tl.store(depths_ptr + out_rows, tl.zeros_like(slots) + depth, mask=is_row)
    tl.store(
        positions_ptr + out_rows, tl.zeros_like(slots) + tl.minimum(prefix_len + depth, last_position), mask=is_row
    )
    tl.store(seq_lens_ptr + request, prefix_len + num_before + width)
    came_from = tl.load(came_from_ptr + request * came_from_stride + rows * came_from_step, mask=is_row, other=0)
    places = tl.arange(0, PLACE_TILE)
    before_ptrs = slots_before_ptr + ((request * width_before + came_from) * depth)[:, None] + places[None, :]
    before = tl.load(before_ptrs, mask=is_row[:, None] & (places < depth)[None, :], other=0)
    paths = tl.where((places == depth)[None, :], slots[:, None], before)
    path_ptrs = path_slots_ptr + (out_rows * path_len)[:, None] + places[None, :]
    tl.store(path_ptrs, paths, mask=is_row[:, None] & (places < path_len)[None, :])


@operator("place_branches")
def place_branches(
    slots_before: torch.Tensor | None,
    came_from: torch.Tensor,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    num_before: int,
    page_size: int,
    max_positions: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the metadata of a new level's branches, after `num_before` branches of earlier levels; all are int64.

    Returns:
        Positions [batch * width] and depths [batch, width], as `place_tree`.
        The cache slots [batch * width] of the positions prefix + `num_before` + branch.
        Lengths [batch]: prefix + `num_before` + width.
        The slots [batch, width, levels] of a branch's ancestors, then its own.

    Args:
        slots_before: [batch, width before, levels - 1], contiguous: those of the level before; None for the first
            level.
        came_from: [batch, width], any strides: each branch's parent, as an index into the level before.
        prefix_lens: [batch].
        page_table: [batch, num_pages + 1].
    """
    batch, width = came_from.shape
    width_before, path_len = (1, 1) if slots_before is None else (slots_before.shape[1], slots_before.shape[2] + 1)
    assert_rows_of(prefix_lens, batch)
    assert slots_before is None or slots_before.is_contiguous()
    places = _empty_places(came_from, path_len)
    with launch_on(prefix_lens):
        _place_branches[(batch,)](
            *places,
            came_from if slots_before is None else slots_before,
            came_from,
            prefix_lens,
            page_table,
            width,
            width_before,
            path_len,
            num_before,
            page_table.shape[1] - 1,
            max_positions - 1,
            page_table.stride(0),
            *came_from.stride(),
            PAGE_SIZE=page_size,
            ROW_TILE=triton.next_power_of_2(width),
            PLACE_TILE=triton.next_power_of_2(path_len),
            num_warps=1,
        )
    return places


def _empty_places(
    rows: torch.Tensor, path_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate what both kernels write for `rows` [batch, N]: positions, cache slots, lengths, depths and paths."""
    batch, num_rows = rows.shape
    positions, slots = (rows.new_empty(batch * num_rows) for _ in range(2))
    return positions, slots, rows.new_empty(batch), rows.new_empty(rows.shape), rows.new_empty(*rows.shape, path_len)
