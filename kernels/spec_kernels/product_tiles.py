"""Tile sizes of products with few rows, tuned on an H200 (docs/log/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

MAX_ROWS = 64
"""The most rows of these kernels. With more, a product is bound by arithmetic, and the library's is faster."""

INVARIANT_ROWS = 16
"""Up to this number of rows all row counts use the same tile, so a row's bits do not depend on other rows."""


MOST_STEPS_AHEAD = 5
"""The most steps of a product's loop whose weight is loaded before its rows are ready."""


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """The division of a product [rows, in_features] x [out_features, in_features] among the programs of a launch.

    Attributes:
        columns: outputs of a program.
        depth: inputs in a step of its loop.
        splits: programs that share the inputs of a tile of outputs.
        stages: steps in the pipeline; one is computed while the others are loaded.
        turned: the weight is the left operand, which Hopper's tensor cores read from shared memory.
        groups: 0 if a program works step by step. Otherwise it loads its whole part of the weight at once, `depth`
            inputs and the `rest`. The inputs are divided into this many groups, one for each warp.
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
        """Return whether no tile extends past the weight's edges."""
        inputs = self.depth + self.rest if self.groups else self.splits * self.depth
        return out_features % self.columns == 0 and in_features % inputs == 0

    def fits_ahead(self, in_features: int, gated: bool) -> bool:
        """Return whether a program can load its whole part of a weight before its rows are ready.

        That part goes to registers if there are `groups`, else to shared memory, which has room for two programs."""
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
"""Special tiles for weights [out_features, in_features] for which they were faster, with up to 16 rows.

Small 16-bit products load their weights at once instead (`tiles_of_product`). In float32, and in a head's argmax
(`likeliest`), weights of these sizes have these tiles.
"""

ENOUGH_PROGRAMS = 128
"""The number of programs that keeps the 132 multiprocessors of an H200 reading. More splits would only add more partial
sums."""

LARGE = 2**26
"""Above this number of elements our products are faster than the library's with 17 to 64 rows too."""


def most_rows(out_features: int, in_features: int, is_narrow: bool = False) -> int:
    """Return the number of rows up to which a plain product uses our kernel. It is `MAX_ROWS` for large weights, and
    for weights of 8 and 4 bits, which the library lacks."""
    return MAX_ROWS if is_narrow or out_features * in_features > LARGE else INVARIANT_ROWS


def row_tile(num_rows: int) -> int:
    """Return the padded number of rows that a program computes for `num_rows` rows."""
    assert 0 < num_rows <= MAX_ROWS
    return next(tile for tile in (16, 32, 64) if num_rows <= tile)


@cache
def choose_tiles(rows: int, out_features: int, in_features: int, gated: bool, is_narrow: bool = False) -> SkinnyTiles:
    """Return the tiles of a product with the row tile `rows`. They are the same for all numbers of rows up to 16.

    A gated product has two weights [out_features, in_features], and so two tiles in each step.
    """
    if is_narrow:
        return _narrow_tiles(rows, out_features, in_features, gated)
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
"""The most elements of a small weight. Its product is bound by its launch and the latency of its steps, not by
bytes."""
_MOST_INPUTS = 3072
"""The number of inputs of `_COLUMNS` outputs that fits the registers of a program."""


@cache
def tiles_of_product(
    rows: int, out_features: int, in_features: int, gated: bool, element_size: int, is_narrow: bool
) -> SkinnyTiles:
    """Return the tiles of a product: for up to 16 rows those that load a small 16-bit weight at once, else those of
    `choose_tiles`."""
    height = 2 if gated else 1
    is_small = in_features * height <= _MOST_INPUTS and height * out_features * in_features <= _SMALL
    if rows > INVARIANT_ROWS or is_narrow or element_size != 2 or not is_small:
        return choose_tiles(rows, out_features, in_features, gated, is_narrow)
    least = 16 * _GROUPS
    depth = max(_power_of_two(in_features + 1) // 2, least)
    rest = max(_power_of_two(in_features - depth), least) if in_features > depth else 0
    return SkinnyTiles(_COLUMNS, depth, groups=_GROUPS, rest=rest)


@dataclass(frozen=True, slots=True)
class ProductLaunch:
    """What the launch of a product takes from the shape of its weight.

    Attributes:
        grid: the number of tiles of outputs, and of splits of the inputs.
        num_partial: the size of the buffer in which splits exchange partial sums.
        constants: compile-time constants and the number of warps.
    """

    grid: tuple[int, int]
    num_partial: int
    constants: dict[str, int]

    def empty_partial(self, rows: torch.Tensor, arrivals: torch.Tensor) -> torch.Tensor:
        """Allocate the partial sums, and check that there is a counter for each tile."""
        assert self.grid[1] == 1 or arrivals.shape[0] >= self.grid[0]
        return rows.new_empty(self.num_partial, dtype=torch.float32)


@cache
def launch_of(tiles: SkinnyTiles, rows: int, out_features: int, in_features: int, gated: bool) -> ProductLaunch:
    """Return the launch of a product with the row tile `rows`; it is kept, since every layer launches it again."""
    num_tiles = -(-out_features // tiles.columns)
    part_size = rows * (tiles.columns * (2 if gated else 1) + 1)
    constants = {
        "IN_FEATURES": in_features,
        "SPLITS": tiles.splits,
        "GROUPS": tiles.groups,
        "ROW_TILE": rows,
        "COLUMN_TILE": tiles.columns,
        "DEPTH": tiles.depth,
        "REST": tiles.rest,
        "STAGES": tiles.stages,
        "TURNED": tiles.turned,
        "WHOLE_TILES": tiles.are_whole(out_features, in_features),
        "num_warps": tiles.num_warps,
    }
    num_partial = num_tiles * tiles.splits * part_size if tiles.splits > 1 else 1
    return ProductLaunch((num_tiles, tiles.splits), num_partial, constants)


def num_arrivals(out_features: int) -> int:
    """Return the number of counters that a product needs, for any number of rows."""
    return -(-out_features // 16)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` and at least 16, the minimum of a tensor core."""
    return max(16, 1 << (size - 1).bit_length())


def _narrow_tiles(rows: int, out_features: int, in_features: int, gated: bool) -> SkinnyTiles:
    """Return the tiles of a product with a weight of 8 or 4 bits, whose steps are blocks of inputs.

    A program computes more for each byte than with 16-bit weights, so more programs are needed to keep memory busy.
    """
    is_few = rows <= INVARIANT_ROWS
    enough = 2 * ENOUGH_PROGRAMS if is_few or in_features > out_features else ENOUGH_PROGRAMS
    num_tiles = -(-out_features // 64)
    splits = 1
    while num_tiles * splits < enough and splits < 4 and in_features % (256 * splits) == 0:
        splits *= 2
    return SkinnyTiles(64, 128, splits, 3 if gated else 5 if is_few else 4, turned=True)
