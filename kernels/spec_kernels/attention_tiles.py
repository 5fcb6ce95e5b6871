"""Tile sizes of attention: how many rows and keys a program takes, and how many keys a split has.

Up to `MAX_DECODE_QUERIES` query rows, the number of rows in a forward changes two things for a row: the height of its
tile, and how many programs share its splits. Neither changes the order of additions, so the row's bits stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

MAX_DECODE_QUERIES = 32
"""Up to this number of query rows, a row's bits do not depend on the number. Above, a chain has the tiles of a prompt
chunk."""

NUM_TILES_TO_FILL = 128
"""The number of row tiles, over all requests and KV heads, that keep a GPU busy without splits."""

_MAX_SPLITS = 32
_SPLIT_UNIT = 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of a program.

    Attributes:
        rows: (query row, query head) pairs of a KV head; for a prompt chunk, query rows of one head.
        keys: key positions in an iteration.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tiles(num_rows: int, channel_tile: int, element_size: int) -> Tiles:
    """Returns tiles for `num_rows` pairs of a KV head, with keys that fit shared memory.

    The height of a tile depends on the number of rows only if keys and channels fill the tensor cores' operands. Then
    the order of summation is the same for every height, so a row's bits do not depend on it. Five stages keep two tiles
    of keys in flight, since addresses wait for the page table. One stage is impossible with tensor core products: ptxas
    12.8 then makes wrong machine code (tests/machine_code.py).
    """
    row_bytes = channel_tile * element_size
    if element_size == 4 or channel_tile < 64:
        return Tiles(16, keys=32 if row_bytes > 256 else 64, num_warps=4, num_stages=5 if row_bytes <= 1024 else 3)
    if channel_tile > 128:
        return Tiles(16, keys=64 if channel_tile == 256 else 32, num_warps=8, num_stages=5)
    return Tiles(rows=16 if num_rows <= 16 else 32, keys=64, num_warps=4, num_stages=5)


def tree_tiles(num_rows: int, channel_tile: int, element_size: int) -> Tiles:
    """Returns tiles for a tree's rows, with the same sums as a chain's.

    Each query row has its own programs, so there are many. Each keeps one tile of keys in flight, which leaves shared
    memory for the other programs.
    """
    return replace(decode_tiles(num_rows, channel_tile, element_size), num_stages=2)


def prompt_tiles(channel_tile: int, element_size: int) -> Tiles:
    """Returns tall tiles, so that many rows share each read of a key.

    Heads in float32 get smaller tiles, the wide heads the smallest. There is no tensor core product for float32, and an
    unrolled product of large tiles takes long to compile.
    """
    row_bytes = channel_tile * element_size
    if element_size == 4:
        return Tiles(rows=64 if row_bytes <= 512 else 16, keys=32, num_warps=4, num_stages=2)
    if row_bytes <= 256:
        return Tiles(rows=128, keys=64, num_warps=8, num_stages=5)
    return Tiles(rows=64, keys=32, num_warps=8, num_stages=3)


def choose_split_keys(max_positions: int) -> int:
    """Returns the number of keys in a split for a cache of `max_positions`.

    It is constant in a run, so that a row has the same bits in every forward.
    """
    return _SPLIT_UNIT * triton.cdiv(max_positions, _SPLIT_UNIT * _MAX_SPLITS)


def choose_latent_tiles(num_heads: int, element_size: int) -> Tiles:
    """Returns tiles of (query row, head) pairs over latent rows, for any number of query rows.

    Keys and channels fill the tensor cores' operands, and pairs are the short side, as in decoding. Two tiles of keys
    fit shared memory beside the queries.
    """
    if element_size == 4:  # there is no tensor core product, and an unrolled one takes long to compile
        return Tiles(rows=16, keys=16, num_warps=4, num_stages=1)
    rows = min(64, max(16, triton.next_power_of_2(num_heads)))
    return Tiles(rows, keys=64, num_warps=4 if rows == 16 else 8, num_stages=2)


def choose_latent_split_keys(max_positions: int, batch_size: int, num_heads: int) -> int:
    """Returns the number of keys in a split of latent attention, which is constant in a run.

    It is chosen so that one row of `batch_size` requests keeps a GPU busy. Up to four requests get as many splits as
    four. The partial result of a split for one row and head takes about as many bytes as two cache rows, and a verify
    has several rows to merge. So splits are no shorter than 16 keys for each request.
    """
    num_tiles = triton.cdiv(num_heads, 64)
    num_splits = max(1, NUM_TILES_TO_FILL // (num_tiles * max(4, batch_size)))
    return _SPLIT_UNIT * max(
        triton.cdiv(max_positions, _SPLIT_UNIT * num_splits), triton.cdiv(16 * batch_size, _SPLIT_UNIT)
    )
