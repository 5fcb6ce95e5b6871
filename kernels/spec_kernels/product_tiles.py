"""Shapes of the tiles of a product with few rows, tuned on an H200 (docs/log/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MAX_ROWS = 64
"""Beyond these a product is bound by arithmetic, and the library's own is ahead."""

INVARIANT_ROWS = 16
"""Up to these all row counts have one tile, so that a row's result does not depend on the rows beside it."""


MOST_STEPS_AHEAD = 5
"""So many steps of a product's loop are loaded before its rows are there."""


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """Says how the programs of a launch share a product [rows, in_features] x [out_features, in_features].

    Attributes:
        columns: outputs of a program.
        depth: inputs of a step of its loop.
        splits: programs that share the inputs of a tile of outputs.
        stages: steps whose loads are in flight, of which one is being computed.
        turned: the weight is the left operand, which Hopper's tensor cores read from shared memory.
        groups: a program loads all of its part of a weight at once, `depth` inputs and the `rest` of them, and so many
            groups of warps share the inputs. 0 where it goes step by step.
    """

    columns: int
    depth: int
    splits: int = 1
    stages: int = 4
    num_warps: int = 4
    turned: bool = False
    groups: int = 0
    rest: int = 0

    def are_whole(self, out_features: int, in_features: int) -> bool:
        """Tell whether no tile reaches beyond the weight."""
        inputs = self.depth + self.rest if self.groups else self.splits * self.depth
        return out_features % self.columns == 0 and in_features % inputs == 0

    def fits_ahead(self, in_features: int, gated: bool) -> bool:
        """Tell whether all that a program reads of a weight fits shared memory beside another program's."""
        if self.groups:
            return True
        steps, rest = divmod(in_features, self.splits * self.depth)
        return not gated and rest == 0 and steps <= MOST_STEPS_AHEAD


TUNED = {
    (2048, 4096): SkinnyTiles(64, 128, splits=8, turned=True),
    (2048, 5120): SkinnyTiles(64, 128, splits=8, turned=True),
    (5120, 768): SkinnyTiles(64, 128, splits=2, turned=True),
    (5120, 2048): SkinnyTiles(64, 128, splits=4, turned=True),
    (6144, 8192): SkinnyTiles(64, 128, splits=2, turned=True),
    (6144, 4096): SkinnyTiles(64, 128, splits=2, turned=True),
    (4096, 12288): SkinnyTiles(64, 128, splits=4, stages=3, turned=True),
    (256, 2560): SkinnyTiles(64, 128, splits=10, turned=True),
    (2560, 256): SkinnyTiles(16, 256, turned=True),
    (2560, 4096): SkinnyTiles(64, 256, splits=2, turned=True),
    (2560, 10240): SkinnyTiles(64, 128, splits=5, turned=True),
    (256, 2048): SkinnyTiles(64, 128, splits=8, turned=True),
    (256, 5120): SkinnyTiles(64, 128, splits=8, turned=True),
    (1024, 256): SkinnyTiles(16, 256, turned=True),
    (2048, 256): SkinnyTiles(16, 256, turned=True),
}
"""The weights [out_features, in_features] for which, with up to 16 rows, other tiles were faster."""

ENOUGH_PROGRAMS = 128
"""Enough to keep the 132 multiprocessors reading; further splits only add up more partial sums."""

LARGE = 2**26
"""A weight of so many numbers is read faster by our products than by the library's with 17 to 64 rows as well."""


def most_rows(out_features: int, in_features: int, is_fp8: bool = False) -> int:
    """Return the number of rows up to which a plain product is ours: all, where the library has none."""
    return MAX_ROWS if is_fp8 or out_features * in_features > LARGE else INVARIANT_ROWS


def row_tile(num_rows: int) -> int:
    """Return the number of rows that a program computes, of which `num_rows` are kept."""
    assert 0 < num_rows <= MAX_ROWS
    return next(tile for tile in (16, 32, 64) if num_rows <= tile)


@cache
def choose_tiles(rows: int, out_features: int, in_features: int, gated: bool, is_fp8: bool = False) -> SkinnyTiles:
    """Return the tiles of a product whose row tile is `rows`: a function of the weight's shape alone for up to 16 rows.

    A gated product has two weights of [out_features, in_features], and so two tiles a step.
    """
    if is_fp8:
        return _fp8_tiles(rows, out_features, in_features, gated)
    if rows == INVARIANT_ROWS and not gated and (out_features, in_features) in TUNED:
        return TUNED[out_features, in_features]
    depth = min(128, _power_of_two(in_features))
    if rows > INVARIANT_ROWS and in_features <= out_features:
        return SkinnyTiles(128, min(64, depth), num_warps=8 if gated else 4, turned=True)
    num_tiles = -(-out_features // 64)
    splits = 1
    while num_tiles * splits < ENOUGH_PROGRAMS and splits < 4 and in_features % (2 * splits * depth) == 0:
        splits *= 2
    stages = 3 if gated else 5 if splits > 1 and rows <= INVARIANT_ROWS else 4
    return SkinnyTiles(64, depth, splits, stages, turned=True)


_GROUPS, _COLUMNS = 4, 8
_SMALL = 2**21
"""A weight of up to so many numbers is small: its product waits for its launch and its steps, and not for its bytes."""
_MOST_INPUTS = 3072
"""So many inputs of `_COLUMNS` outputs fit the registers of a program."""


@cache
def tiles_of_product(
    rows: int, out_features: int, in_features: int, gated: bool, element_size: int, is_fp8: bool
) -> SkinnyTiles:
    """Return the tiles of a product: of a small 16-bit weight at once, else those of `choose_tiles`."""
    height = 2 if gated else 1
    is_small = in_features * height <= _MOST_INPUTS and height * out_features * in_features <= _SMALL
    if rows > INVARIANT_ROWS or is_fp8 or element_size != 2 or not is_small:
        return choose_tiles(rows, out_features, in_features, gated, is_fp8)
    least = 16 * _GROUPS
    depth = max(_power_of_two(in_features + 1) // 2, least)
    rest = max(_power_of_two(in_features - depth), least) if in_features > depth else 0
    return SkinnyTiles(_COLUMNS, depth, groups=_GROUPS, rest=rest)


def num_arrivals(out_features: int) -> int:
    """Return the number of counters that a product needs, whatever its number of rows."""
    return -(-out_features // 16)


def _power_of_two(size: int) -> int:
    """Return the least power of two that is at least `size`, and at least 16, as a tensor core wants it."""
    return max(16, 1 << (size - 1).bit_length())


def _fp8_tiles(rows: int, out_features: int, in_features: int, gated: bool) -> SkinnyTiles:
    """Return the tiles of a product with a weight in e4m3, a step of which is a block of inputs.

    A program computes more for a byte than one of 16-bit weights, so that more of them have to keep memory busy.
    """
    is_few = rows <= INVARIANT_ROWS
    enough = 2 * ENOUGH_PROGRAMS if is_few or in_features > out_features else ENOUGH_PROGRAMS
    num_tiles = -(-out_features // 64)
    splits = 1
    while num_tiles * splits < enough and splits < 4 and in_features % (256 * splits) == 0:
        splits *= 2
    return SkinnyTiles(64, 128, splits, 3 if gated else 5 if is_few else 4, turned=True)
