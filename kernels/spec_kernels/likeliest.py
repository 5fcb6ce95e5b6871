"""The likeliest token of a few rows: product with the head and argmax in one kernel, with norm and token map if given.

On request it also computes the probability of that token. Each tile then keeps a sum of exponentials beside its top,
and both are merged (Milakov and Gimelshein 2018, arXiv 1805.02867). No logits are written in either case.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.product_loads import Operands, ProductForm, Tiling
from spec_kernels.product_steps import sums_of_split
from spec_kernels.product_tiles import choose_tiles, row_tile
from spec_kernels.utils import assert_rows_of, assert_whole, launch_on
from spec_kernels.vocabulary import NO_TOKEN, add_sums, finite_or_zero, lowest_top, merge_sums, nan_as_largest

_MERGE_TILE = 128


class Tops(NamedTuple):
    """Pointers to the top of each row in each tile, its id, and the tile's sum of exponentials."""

    tops: tl.tensor
    ids: tl.tensor
    sums: tl.tensor


@triton.jit
def _best_of_tiles(
    of: Tops, row: tl.tensor, is_row: tl.tensor, num_tiles: tl.tensor, WEIGHED: tl.constexpr, MERGE_TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the best tops [rows, MERGE_TILE] over all tiles, their ids, and if WEIGHED their sums."""
    best = tl.full((row.shape[0], MERGE_TILE), float("-inf"), tl.float32)
    best_id = tl.full((row.shape[0], MERGE_TILE), NO_TOKEN, tl.int32)
    total = tl.zeros((row.shape[0], MERGE_TILE), tl.float32)
    for first in range(0, num_tiles, MERGE_TILE):
        tiles = first + tl.arange(0, MERGE_TILE)[None, :]
        at = row[:, None] * num_tiles + tiles
        is_part = is_row[:, None] & (tiles < num_tiles)
        tops = tl.load(of.tops + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        top_ids = tl.load(of.ids + at, mask=is_part, other=NO_TOKEN, cache_modifier=".cg")
        if WEIGHED:
            own_sums = tl.load(of.sums + at, mask=is_part, other=0.0, cache_modifier=".cg")
            total = add_sums(total, best, own_sums, tops)
        is_better = (tops > best) | ((tops == best) & (top_ids < best_id))
        best = tl.where(is_better, tops, best)
        best_id = tl.where(is_better, top_ids, best_id)
    return best, best_id, total


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _likeliest(
    tokens_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    token_map_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    rows_stride: tl.tensor,
    eps: tl.tensor,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    NORMED: tl.constexpr,
    MAPPED: tl.constexpr,
    WEIGHED: tl.constexpr,
    MERGE_TILE: tl.constexpr,
) -> None:
    """Finds the top of each row in one tile of tokens. The last program to finish compares the tops of all tiles."""
    tile = tl.program_id(0)
    num_tiles = tl.num_programs(0)
    row = tl.arange(0, ROW_TILE)
    token = tile * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_row = row < num_rows
    sums, _, square_sum = sums_of_split(
        Operands(rows_ptr, weight_ptr, weight_ptr, norm_ptr, sums_ptr, arrivals_ptr),
        tile * 0,
        token,
        num_rows,
        num_tokens,
        rows_stride,
        Tiling(IN_FEATURES, 1, 0, ROW_TILE, COLUMN_TILE, DEPTH, 0, STAGES, TURNED, WHOLE_TILES),
        ProductForm(0, NORMED, False, False, False),
    )
    if NORMED:
        sums = sums * tl.rsqrt(square_sum / IN_FEATURES + eps)[:, None]

    # Logits are rounded to the dtype before they are compared, so that ties are the same as for stored logits.
    # `product` may sum in another order: it loads a small head at once, and may split the inputs of others. A
    # draft may then differ, but is verified anyway.
    logits = nan_as_largest(sums.to(weight_ptr.dtype.element_ty).to(tl.float32))
    ids = tl.broadcast_to(token[None, :], (ROW_TILE, COLUMN_TILE))
    logits = tl.where((token < num_tokens)[None, :], logits, float("-inf"))
    top, top_id = lowest_top(logits, ids, 1)
    tl.store(tops_ptr + row * num_tiles + tile, top, mask=is_row)
    tl.store(top_ids_ptr + row * num_tiles + tile, top_id, mask=is_row)
    if WEIGHED:
        own_sum = tl.sum(tl.exp(logits - finite_or_zero(top)[:, None]), 1)
        tl.store(sums_ptr + row * num_tiles + tile, own_sum, mask=is_row)
    tl.debug_barrier()  # all threads must have stored before one signals it
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == num_tiles - 1:
        of = Tops(tops_ptr, top_ids_ptr, sums_ptr)
        best, best_id, total = _best_of_tiles(of, row, is_row, num_tiles, WEIGHED, MERGE_TILE)
        top, token_id = lowest_top(best, best_id, 1)
        found = token_id.to(tl.int64)
        if MAPPED:
            found = tl.load(token_map_ptr + found, mask=is_row & (found < num_tokens), other=0)
        tl.store(tokens_ptr + row, found, mask=is_row)
        if WEIGHED:
            total = merge_sums(total, best, top[:, None], 1)
            tl.store(probabilities_ptr + row, 1.0 / tl.where(is_row, total, 1.0), mask=is_row)
        tl.store(arrivals_ptr, 0)


@operator("likeliest", mutates_args=("arrivals",))
def likeliest(
    rows: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    token_map: torch.Tensor | None,
    weighed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the argmax of each row's logits for up to 64 rows; ties go to the lowest id in the head.

    Returns the tokens [rows], and their float32 probabilities [rows] in the softmax of the head's logits, which are
    computed if `weighed`.

    Args:
        rows: [rows, in_features].
        weight: [vocab, in_features], contiguous: a head.
        arrivals: [1 or more] int32 zeros, and zero again afterwards; only kernels of one stream may share it.
        norm_weight: [in_features] float32, of an RMSNorm of the rows with `eps`; None for no norm.
        token_map: [vocab] int64, the target id of each id of the head; None if they are equal.
    """
    (num_rows, in_features), num_tokens = rows.shape, weight.shape[0]
    assert_whole((weight,), num_tokens, in_features)
    assert_rows_of(rows, num_rows, in_features)
    assert rows.dtype == weight.dtype
    tile_rows = row_tile(num_rows)
    tiles = choose_tiles(tile_rows, num_tokens, in_features, False)
    num_tiles = triton.cdiv(num_tokens, tiles.columns)
    tops = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=rows.device)
    top_ids = torch.empty_like(tops, dtype=torch.int32)
    sums = torch.empty_like(tops) if weighed else tops
    tokens, probabilities = top_ids.new_empty(num_rows, dtype=torch.int64), tops.new_empty(num_rows)
    with launch_on(rows):
        _likeliest[(num_tiles,)](
            tokens,
            probabilities,
            rows,
            weight,
            tops if norm_weight is None else norm_weight,
            tokens if token_map is None else token_map,
            tops,
            top_ids,
            sums,
            arrivals,
            num_rows,
            num_tokens,
            rows.stride(0),
            eps,
            IN_FEATURES=in_features,
            ROW_TILE=tile_rows,
            COLUMN_TILE=tiles.columns,
            DEPTH=tiles.depth,
            STAGES=tiles.stages,
            TURNED=tiles.turned,
            WHOLE_TILES=num_tokens % tiles.columns == 0 and in_features % tiles.depth == 0,
            NORMED=norm_weight is not None,
            MAPPED=token_map is not None,
            WEIGHED=weighed,
            MERGE_TILE=_MERGE_TILE,
            num_warps=tiles.num_warps,
        )
    return tokens, probabilities
