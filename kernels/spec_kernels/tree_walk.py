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


def _check_walk(
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
) -> None:
    batch, num_rows = drafts.shape
    assert_rows_of(tokens, *path.shape)
    assert_rows_of(num_emitted, batch)
    assert_rows_of(active, batch)
    assert_rows_of(drafts, batch, num_rows)
    assert_rows_of(parents, batch, num_rows)
    assert tokens.is_contiguous() and path.is_contiguous() and path.shape[0] == batch


def _launch_follow(
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    tops: torch.Tensor | None,
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
) -> None:
    """Launch the walk over chosen tokens, or over the top of each tile."""
    batch, num_rows = drafts.shape
    num_columns, num_tiles = path.shape[1], 1 if tops is None else tops.shape[1]
    _follow[(batch,)](
        tokens,
        num_emitted,
        path,
        chosen if tops is None else tops,
        chosen,
        drafts,
        parents,
        active,
        num_rows,
        num_tiles,
        num_columns - 1,
        drafts.stride(0),
        parents.stride(0),
        IS_CHOSEN=tops is None,
        ROW_TILE=triton.next_power_of_2(num_rows),
        TILE_TILE=triton.next_power_of_2(num_tiles),
        COLUMN_TILE=triton.next_power_of_2(num_columns),
        num_warps=1,
    )


@operator("follow_chosen", mutates_args=("tokens", "num_emitted", "path"))
def follow_chosen(
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
) -> None:
    """Walk down from the root. Each step goes to the child that holds the token chosen after the current row, and the
    walk ends where there is none.

    Args:
        tokens: [batch, depth + 1] int64, contiguous, written: the tokens chosen along the path.
        num_emitted: [batch] int64, written: the number of rows on the path, 0 if inactive.
        path: [batch, depth + 1] int64, contiguous, written; after its end column j holds row j, or the last row if
            there is no row j.
        chosen: [batch, N] int64, contiguous.
        drafts, parents: [batch, N] int64, of any row stride.
        active: [batch] bool.
    """
    _check_walk(tokens, num_emitted, path, drafts, parents, active)
    assert_rows_of(chosen, *drafts.shape)
    assert chosen.is_contiguous()
    with launch_on(chosen):
        _launch_follow(tokens, num_emitted, path, None, chosen, drafts, parents, active)


@operator("follow_argmax", mutates_args=("tokens", "num_emitted", "path"))
def follow_argmax(
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
) -> None:
    """Do what `follow_chosen` does with the argmax of each row, compared in float32; ties go to the lowest id.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16; the other arguments are those of `follow_chosen`.
    """
    _check_walk(tokens, num_emitted, path, drafts, parents, active)
    assert tuple(logits.shape[:2]) == tuple(drafts.shape) and logits.stride(2) == 1
    with launch_on(logits):
        _launch_follow(tokens, num_emitted, path, *tops_of_tiles(logits), drafts, parents, active)


@operator("impose_path", mutates_args=("tokens", "num_emitted", "path"))
def write_path(
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    rates: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """Accept as many drafts as there are rates above the round's draw.

    The path is the first one with that number of drafts, or the first of the longest if all are shorter. The tokens are
    the path's drafts, followed by the argmax of its last row.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16.
        rates: [any number] float64, not increasing.
        slot_ids: [batch] int64; with `slot_seeds` [num_slots + 1] int64 and `kv_lens` [batch] int64 they key the draw.
            The other arguments are those of `follow_chosen`.
    """
    _check_walk(tokens, num_emitted, path, drafts, parents, active)
    (batch, num_rows), num_columns = drafts.shape, path.shape[1]
    for tensor in (slot_ids, kv_lens):
        assert_rows_of(tensor, batch)
    assert tuple(logits.shape[:2]) == tuple(drafts.shape) and logits.stride(2) == 1
    with launch_on(logits):
        tops, top_ids = tops_of_tiles(logits)
        _impose[(batch,)](
            tokens,
            num_emitted,
            path,
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
            num_columns - 1,
            drafts.stride(0),
            parents.stride(0),
            ROW_TILE=triton.next_power_of_2(num_rows),
            TILE_TILE=triton.next_power_of_2(tops.shape[1]),
            COLUMN_TILE=triton.next_power_of_2(num_columns),
            RATE_TILE=triton.next_power_of_2(max(rates.shape[0], 1)),
            num_warps=1,
        )


def empty_walk(drafts: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the tokens, num_emitted and path that a walk writes."""
    tokens, path = drafts.new_empty((2, drafts.shape[0], depth + 1))
    return tokens, drafts.new_empty(tokens.shape[0]), path


def follow_tree(
    logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, active: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, num_emitted and path as `follow_argmax` writes them."""
    tokens, num_emitted, path = empty_walk(drafts, depth)
    follow_argmax(tokens, num_emitted, path, logits, drafts, parents, active)
    return tokens, num_emitted, path


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
    """Return tokens, num_emitted and path as `write_path` writes them."""
    tokens, num_emitted, path = empty_walk(drafts, depth)
    write_path(tokens, num_emitted, path, logits, drafts, parents, active, rates, slot_ids, slot_seeds, kv_lens)
    return tokens, num_emitted, path
