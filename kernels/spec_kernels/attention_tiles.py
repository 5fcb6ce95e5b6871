"""Cuts the work of attention into programs: how many rows and keys each takes, and how many keys a split has.

Neither depends on what stands beside a row, so that no bit of its result does. How many programs share a row's splits
may: the splits are merged one after the other in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

MAX_DECODE_QUERIES = 32
"""Up to here a row does not depend on the number of query rows; above, tiles are those of a prompt chunk."""

NUM_TILES_TO_FILL = 128
"""So many row tiles, of all requests and KV heads, keep a GPU busy without splits."""

_MAX_SPLITS = 32
_SPLIT_UNIT = 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """Says how much a program takes on.

    Attributes:
        rows: (query row, query head) pairs of a KV head; of a prompt chunk query rows of one head.
        keys: key positions an iteration.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tiles(num_rows: int, channel_tile: int, element_size: int) -> Tiles:
    """Returns tiles for `num_rows` pairs of a KV head, of keys that fit shared memory.

    How high a tile is depends on the number of rows only where keys and channels are whole operands of a tensor core:
    they are added up in the same order whatever stands beside them, so that no bit of a row depends on it. Two tiles of
    keys in flight, whose addresses wait for the page table, take five stages. One stage is no choice where there are
    tensor core products: ptxas 12.8 makes wrong machine code of it (tests/machine_code.py).
    """
    row_bytes = channel_tile * element_size
    if element_size == 4 or channel_tile < 64:
        return Tiles(16, keys=32 if row_bytes > 256 else 64, num_warps=4, num_stages=5 if row_bytes <= 1024 else 3)
    if channel_tile > 128:
        return Tiles(16, keys=64 if channel_tile == 256 else 32, num_warps=8, num_stages=5)
    return Tiles(rows=16 if num_rows <= 16 else 32, keys=64, num_warps=4, num_stages=5)


def tree_tiles(num_rows: int, channel_tile: int, element_size: int) -> Tiles:
    """Returns tiles of a tree's rows, which have the same sums as a chain's.

    Each query row has programs of its own, so that there are many: one tile of keys in flight leaves the others the
    shared memory that a second one would take.
    """
    return replace(decode_tiles(num_rows, channel_tile, element_size), num_stages=2)


def prompt_tiles(channel_tile: int, element_size: int) -> Tiles:
    """Returns tiles as high as registers allow, so that many rows share the reading of a key.

    Not for the widest heads in float32, which have no tensor core product: the unrolled one takes long to compile.
    """
    row_bytes = channel_tile * element_size
    if element_size == 4:
        return Tiles(rows=64 if row_bytes <= 512 else 16, keys=32, num_warps=4, num_stages=2)
    if row_bytes <= 256:
        return Tiles(rows=128, keys=64, num_warps=8, num_stages=5)
    return Tiles(rows=64, keys=32, num_warps=8, num_stages=3)


def choose_split_keys(max_positions: int) -> int:
    """Returns the keys of a split for a cache of `max_positions`.

    It is one value a run, so that rows can be compared.
    """
    return _SPLIT_UNIT * triton.cdiv(max_positions, _SPLIT_UNIT * _MAX_SPLITS)


def choose_latent_tiles(num_heads: int, split_keys: int, element_size: int) -> Tiles:
    """Returns tiles of (query row, head) pairs over latent rows, whatever the number of query rows.

    Of few heads keys and channels lie across, as in decoding: they are the whole operands of tensor core products, and
    pairs the short side. Two tiles of keys fit shared memory beside the queries. Where splits are short, as of short
    contexts, narrow tiles begin sooner; over longer ones wide tiles share the reading of keys. Of many heads 64 pairs
    are rows of the products, which took three quarters of the time on an H200.
    """
    if element_size == 4:  # no tensor core product: an unrolled one takes long to compile
        return Tiles(rows=16, keys=16, num_warps=4, num_stages=1)
    if num_heads <= 16 or (num_heads <= 32 and split_keys <= _SPLIT_UNIT):
        return Tiles(rows=16, keys=64, num_warps=4, num_stages=3)
    if num_heads <= 32:
        return Tiles(rows=32, keys=64, num_warps=8, num_stages=3)
    return Tiles(rows=64, keys=64, num_warps=8, num_stages=2)


def choose_latent_split_keys(max_positions: int, batch_size: int, num_heads: int) -> int:
    """Returns the keys of a split of latent attention, one value a run, with which four rows of `batch_size` requests
    keep a GPU busy, and of many heads two.

    What a split leaves of a row and head weighs as much as two cache rows, so that further ones are no help.
    """
    if num_heads <= 32:
        num_tiles = triton.cdiv(4 * num_heads, 16 if num_heads <= 16 else 32)
    else:
        num_tiles = triton.cdiv(2 * num_heads, 64)
    num_splits = max(1, NUM_TILES_TO_FILL // (num_tiles * batch_size))
    return _SPLIT_UNIT * triton.cdiv(max_positions, _SPLIT_UNIT * num_splits)
