"""Cuts the work of attention into programs: how many rows and keys each takes, and how many keys a split has.

Neither depends on what stands beside a row, so that no bit of its result does.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

MAX_DECODE_QUERIES = 16
"""Up to here a row does not depend on the number of query rows; above, tiles are those of a prompt chunk."""

_MAX_SPLITS = 32
_MIN_SPLIT_KEYS = 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """One program's work: `rows` (query row, query head) pairs of a KV head, `keys` positions an iteration."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tiles(num_queries: int, channel_tile: int, element_size: int) -> Tiles:
    """Returns tiles that fit shared memory. Up to MAX_DECODE_QUERIES they do not depend on `num_queries`.

    A prompt chunk's tiles are higher, so that its many rows share the reading of a key; not for the widest heads in
    float32, which have no tensor core product: the unrolled one takes long to compile.
    """
    row_bytes = channel_tile * element_size
    keys = 32 if row_bytes > 256 else 64
    is_high = num_queries > MAX_DECODE_QUERIES and row_bytes <= 512
    return Tiles(rows=64 if is_high else 16, keys=keys, num_warps=4, num_stages=2)


def choose_split_keys(max_positions: int) -> int:
    """Returns the keys of a split, a power of two, for a cache of `max_positions`.

    It is one value a run, so that rows can be compared.
    """
    return max(_MIN_SPLIT_KEYS, triton.next_power_of_2(triton.cdiv(max_positions, _MAX_SPLITS)))


def choose_latent_tiles(num_heads: int, row_width: int, element_size: int) -> Tiles:
    """Returns tiles of (query row, head) pairs over latent rows, whatever the number of query rows.

    A tile is as high as its sums of values fit registers, since every tile reads all rows of a request.
    """
    if element_size == 4:  # no tensor core product: an unrolled one takes long to compile
        return Tiles(rows=16, keys=16, num_warps=4, num_stages=1)
    rows = 64 if num_heads >= 16 else 16
    return Tiles(rows=rows, keys=32, num_warps=8 if rows == 64 else 4, num_stages=2)
