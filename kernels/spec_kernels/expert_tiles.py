"""Cuts the products of experts into programs: how many pairs of row and expert, columns and channels each takes.

Up to `MAX_INVARIANT_ROWS` rows none of it depends on how many rows there are, so that no bit of a row's result does.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_INVARIANT_ROWS = 16
"""Up to here a row does not depend on the number of rows beside it; above, tiles grow with the pairs of an expert."""

_MAX_PAIRS = 64


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One program's work of a product: `columns` of the output, `channels` an iteration."""

    columns: int
    channels: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both products; `pairs` of one expert share its weights once they are read."""

    pairs: int
    gate_up: ProductTiles
    down: ProductTiles


def choose_expert_tiles(num_rows: int, pairs_each: float, element_size: int) -> ExpertTiles:
    """Returns tiles that fit shared memory; `pairs_each` is the mean number of pairs an expert has."""
    if element_size == 4:  # no tensor core product: an unrolled one takes long to compile
        return ExpertTiles(16, ProductTiles(32, 32, 4, 2), ProductTiles(32, 32, 4, 2))
    pairs = 16
    while num_rows > MAX_INVARIANT_ROWS and pairs < _MAX_PAIRS and pairs < 2 * pairs_each:
        pairs *= 2
    return ExpertTiles(pairs, ProductTiles(32, 128, 4, 4), ProductTiles(64, 128, 4, 3))
