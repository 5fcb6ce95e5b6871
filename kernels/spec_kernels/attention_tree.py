"""Divides the rows and keys of a tree's attention among its programs.

All rows share the splits before the root's, as a chain's rows share all splits. From the root's split on, each query
row has its own programs, so that none reads keys that only another row sees.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tree_tile(
    place: tl.tensor,
    num_own: tl.tensor,
    num_shared: tl.tensor,
    num_splits: tl.tensor,
    num_queries: tl.tensor,
    GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Returns the task of the program at `place` of a tree's launch.

    A query row is a token of the tree, and has GROUP rows, one for each query head of the KV head. Each program takes a
    tile of rows. The first `num_own` take the root's split, each for a single query row. The next `num_shared` take the
    splits before it. The rest take later splits, again for a single query row; these often have no keys.

    Returns:
        Whether the program has a single query row, its request, its first row, the end of the rows of its query row or
        request, and the index of its split.
    """
    TILES_PER_QUERY: tl.constexpr = (GROUP + ROW_TILE - 1) // ROW_TILE
    tiles_per_request = tl.cdiv(num_queries * GROUP, ROW_TILE)
    is_own = (place < num_own) | (place >= num_own + num_shared)
    number = tl.where(place < num_own, place, place - tl.where(is_own, num_shared, num_own))
    per_split = tl.where(is_own, num_own, num_shared // num_splits)
    split, tile = number // per_split, number % per_split
    own_row = tile // TILES_PER_QUERY
    request = tl.where(is_own, own_row // num_queries, tile // tiles_per_request)
    own_first = (own_row - request * num_queries) * GROUP
    first_row = tl.where(
        is_own, own_first + tile % TILES_PER_QUERY * ROW_TILE, (tile - request * tiles_per_request) * ROW_TILE
    )
    return is_own, request, first_row, tl.where(is_own, own_first + GROUP, num_queries * GROUP), split


@triton.jit
def tree_keys(
    is_own: tl.tensor,
    split: tl.tensor,
    prefix_len: tl.tensor,
    own_depth: tl.tensor,
    num_readable: tl.tensor,
    window: tl.tensor,
    split_keys: tl.tensor,
    IS_WHOLE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the keys [low, high) that a program reads, and the entry of its result among a row's partial results.

    If there are no keys, the result is not read. If `is_own`, the program has one query row, of depth `own_depth`, and
    split 0 is the root's. If IS_WHOLE, all shared splits are one entry, and those of a query row follow.
    """
    root_split = prefix_len // split_keys
    first, end = split * split_keys, (split + 1) * split_keys
    if IS_WHOLE:
        first, end = tl.where(is_own, first, 0), tl.where(is_own, end, root_split * split_keys)
        entry = tl.where(is_own, split + 1, 0)
    else:
        entry = split + tl.where(is_own, root_split, 0)
    shift = tl.where(is_own, root_split * split_keys, 0)
    own_end = tl.where(is_own, prefix_len + 1 + own_depth, root_split * split_keys)
    lowest = prefix_len + 1 + tl.where(is_own, own_depth, 0) - window
    low = tl.maximum(tl.maximum(lowest, 0), first + shift)
    high = tl.minimum(tl.minimum(own_end, num_readable), end + shift)
    return low, high, entry


@triton.jit
def tree_slots(
    path_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    keys: tl.tensor,
    prefix_len: tl.tensor,
    is_key: tl.tensor,
    PAGE_SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns the cache slots of `keys`: by a request's pages in the prefix, and by a row's path after it."""
    # One load for both tables, so that keys wait no longer than in a chain.
    behind = keys - prefix_len
    places = tl.load(tl.where(behind >= 0, path_ptr + behind, pages_ptr + keys // PAGE_SIZE), mask=is_key, other=0)
    return tl.where(behind >= 0, places, places * PAGE_SIZE + keys % PAGE_SIZE)
