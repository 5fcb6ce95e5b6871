"""Walks down a tree of drafts: follows from the root the children that the target chose, or finds a path of an imposed
length.

In torch each level of a walk takes a dozen small operators. Here one program walks the tree of one request. A greedy
walk needs the argmax after each row, which `strict.py` finds in tiles.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.noise import USE_SYNTHETIC, round_key, uniform
from spec_kernels.operators import operator
from spec_kernels.strict import tops_of_tiles
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import NO_TOKEN, lowest_top


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "depth"])
def _follow(
    tokens_ptr: tl.tensor,
    num_emitted_ptr: tl.tensor,
    path_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    active_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    depth: tl.tensor,
    draft_stride: tl.tensor,
    parents_stride: tl.tensor,
    IS_CHOSEN: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TILE_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
) -> None:
    """Walks the tree of one request. The inputs are the chosen tokens, or the best token of each tile of each row."""
    request = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    if IS_CHOSEN:
        chosen = tl.load(chosen_ptr + request * num_rows + rows, mask=is_row, other=-1)
    else:
        tiles = tl.arange(0, TILE_TILE)[None, :]
        is_tile = is_row[:, None] & (tiles < num_tiles)
        parts = (request * num_rows + rows)[:, None] * num_tiles + tiles
        tops = tl.load(tops_ptr + parts, mask=is_tile, other=float("-inf"))
        _, best = lowest_top(tops, tl.load(chosen_ptr + parts, mask=is_tile, other=NO_TOKEN), 1)
        chosen = best.to(tl.int64)
    drafts = tl.load(draft_tokens_ptr + request * draft_stride + rows, mask=is_row, other=-2)
    parents = tl.load(parents_ptr + request * parents_stride + rows, mask=is_row, other=-1)
    is_draft = is_row & (rows > 0)

    columns = tl.arange(0, COLUMN_TILE)
    path = tl.minimum(columns, num_rows - 1)
    is_active = tl.load(active_ptr + request) != 0
    goes_on, row, num_accepted = is_active, tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for level in range(1, depth + 1):
        wanted = tl.sum(tl.where(rows == row, chosen, 0), 0)
        hit = tl.min(tl.where(is_draft & (parents == row) & (drafts == wanted), rows, ROW_TILE), 0)
        goes_on = goes_on & (hit < ROW_TILE)
        row = tl.where(goes_on, hit, row)
        num_accepted += goes_on.to(tl.int32)
        path = tl.where(goes_on & (columns == level), row, path)

    is_column, out = columns <= depth, request * (depth + 1) + columns
    tokens = tl.sum(tl.where(rows[:, None] == path[None, :], chosen[:, None], 0), 0)
    tl.store(path_ptr + out, path, mask=is_column)
    tl.store(tokens_ptr + out, tokens, mask=is_column)
    tl.store(num_emitted_ptr + request, tl.where(is_active, num_accepted + 1, 0))


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_rates", "depth"])
def _impose(
    tokens_ptr: tl.tensor,
    num_emitted_ptr: tl.tensor,
    path_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    active_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    slot_seeds_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    num_rates: tl.tensor,
    depth: tl.tensor,
    draft_stride: tl.tensor,
    parents_stride: tl.tensor,
    ROW_TILE: tl.constexpr,
    TILE_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    RATE_TILE: tl.constexpr,
) -> None:
    """Draws how many drafts of one request are accepted, and takes the first path of that length, or the first of
    the longest."""
    request = tl.program_id(0).to(tl.int64)
    seed = tl.load(slot_seeds_ptr + tl.load(slot_ids_ptr + request))
    kv_len = tl.load(kv_lens_ptr + request)
    draw = uniform(round_key(seed, kv_len, tl.zeros_like(kv_len), USE_SYNTHETIC))
    rate = tl.arange(0, RATE_TILE)
    rates = tl.load(rates_ptr + rate, mask=rate < num_rates, other=0.0)
    imposed = tl.sum(((rate < num_rates) & (draw < rates)).to(tl.int32), 0)

    of_request = parents_ptr + request * parents_stride
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    depths, at = tl.zeros((ROW_TILE,), tl.int32), rows.to(tl.int64)
    for _ in range(depth):
        above = tl.load(of_request + at, mask=is_row, other=0)
        depths += (above != at).to(tl.int32)
        at = above
    num_accepted = tl.minimum(imposed, tl.max(tl.where(is_row, depths, 0), 0))
    last = tl.min(tl.where(is_row & (depths == num_accepted), rows, ROW_TILE), 0)

    # But for the path's end, a column's token is the draft in the next column's row. The last column has no next one
    # and takes the root's token, as the torch form does.
    columns = tl.arange(0, COLUMN_TILE)
    following = (columns + 1) % (depth + 1)
    path = tl.minimum(columns, num_rows - 1)
    rows_behind = tl.minimum(following, num_rows - 1)
    row = last
    for step in range(depth + 1):
        level = num_accepted - step
        path = tl.where(columns == level, row, path)
        rows_behind = tl.where(following == level, row, rows_behind)
        row = tl.load(of_request + row).to(tl.int32)

    tiles = tl.arange(0, TILE_TILE)
    parts = (request * num_rows + last) * num_tiles + tiles
    tops = tl.load(tops_ptr + parts, mask=tiles < num_tiles, other=float("-inf"))
    _, best = lowest_top(tops, tl.load(top_ids_ptr + parts, mask=tiles < num_tiles, other=NO_TOKEN), 0)
    is_column = columns <= depth
    out = request * (depth + 1) + columns
    drafts = tl.load(draft_tokens_ptr + request * draft_stride + rows_behind, mask=is_column, other=0)
    tl.store(path_ptr + out, path, mask=is_column)
    tl.store(tokens_ptr + out, tl.where(columns == num_accepted, best.to(tl.int64), drafts), mask=is_column)
    is_active = tl.load(active_ptr + request) != 0
    tl.store(num_emitted_ptr + request, tl.where(is_active, num_accepted + 1, 0))


Walk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _empty_walk(drafts: torch.Tensor, parents: torch.Tensor, active: torch.Tensor, depth: int) -> Walk:
    """Check what a walk reads, and allocate the tokens, num_emitted and path that it writes."""
    batch, num_rows = drafts.shape
    assert_rows_of(active, batch)
    assert_rows_of(drafts, batch, num_rows)
    assert_rows_of(parents, batch, num_rows)
    tokens, path = drafts.new_empty((2, batch, depth + 1))
    return tokens, drafts.new_empty(batch), path


def _follow_tree(
    tops: torch.Tensor | None,
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    depth: int,
) -> Walk:
    """Launch the walk over chosen tokens, or over the top of each tile."""
    walk = _empty_walk(drafts, parents, active, depth)
    (batch, num_rows), num_tiles = drafts.shape, 1 if tops is None else tops.shape[1]
    _follow[(batch,)](
        *walk,
        chosen if tops is None else tops,
        chosen,
        drafts,
        parents,
        active,
        num_rows,
        num_tiles,
        depth,
        drafts.stride(0),
        parents.stride(0),
        IS_CHOSEN=tops is None,
        ROW_TILE=triton.next_power_of_2(num_rows),
        TILE_TILE=triton.next_power_of_2(num_tiles),
        COLUMN_TILE=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
    return walk


@operator("follow_chosen")
def follow_chosen(
    chosen: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, active: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk down from the root. Each step goes to the child that holds the token chosen after the current row, and the
    walk ends where there is none.

    Args:
        chosen: [batch, N] int64, contiguous.
        drafts, parents: [batch, N] int64, of any row stride.
        active: [batch] bool.

    Returns:
        The tokens chosen along the path [batch, depth + 1]; the number of rows on the path [batch], 0 if inactive; and
        the path [batch, depth + 1]. After its end column j holds row j, or the last row if there is no row j.
    """
    assert_rows_of(chosen, *drafts.shape)
    assert chosen.is_contiguous()
    with launch_on(chosen):
        return _follow_tree(None, chosen, drafts, parents, active, depth)


@operator("follow_argmax")
def follow_tree(
    logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, active: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `follow_chosen` does with the argmax of each row, compared in float32; ties go to the lowest id.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16; the other arguments are those of `follow_chosen`.
    """
    assert tuple(logits.shape[:2]) == tuple(drafts.shape) and logits.stride(2) == 1
    with launch_on(logits):
        return _follow_tree(*tops_of_tiles(logits), drafts, parents, active, depth)


@operator("impose_path")
def impose_path(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    rates: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept as many drafts as there are rates above the round's draw; returns what `follow_chosen` does.

    The path is the first one with that number of drafts, or the first of the longest if all are shorter. The tokens are
    the path's drafts, followed by the argmax of its last row.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16.
        rates: [any number] float64, not increasing.
        slot_ids: [batch] int64; with `slot_seeds` [num_slots + 1] int64 and `kv_lens` [batch] int64 they key the draw.
            The other arguments are those of `follow_chosen`.
    """
    walk = _empty_walk(drafts, parents, active, depth)
    batch, num_rows = drafts.shape
    for tensor in (slot_ids, kv_lens):
        assert_rows_of(tensor, batch)
    assert tuple(logits.shape[:2]) == tuple(drafts.shape) and logits.stride(2) == 1
    with launch_on(logits):
        tops, top_ids = tops_of_tiles(logits)
        _impose[(batch,)](
            *walk,
            tops,
            top_ids,
            drafts,
            parents,
            active,
            rates,
            slot_ids,
            slot_seeds,
            kv_lens,
            num_rows,
            tops.shape[1],
            rates.shape[0],
            depth,
            drafts.stride(0),
            parents.stride(0),
            ROW_TILE=triton.next_power_of_2(num_rows),
            TILE_TILE=triton.next_power_of_2(tops.shape[1]),
            COLUMN_TILE=triton.next_power_of_2(depth + 1),
            RATE_TILE=triton.next_power_of_2(max(rates.shape[0], 1)),
            num_warps=1,
        )
    return walk
