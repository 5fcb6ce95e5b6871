"""Cuts the products of experts into programs: how many pairs of row and expert, columns and channels each takes.

Up to `MAX_INVARIANT_ROWS` rows none of it depends on how many rows there are, so that no bit of a row's result does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_INVARIANT_ROWS = 16
"""Up to here a row does not depend on the number of rows beside it; above, tiles grow with the pairs of an expert."""


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One program's work of a product: `columns` of the output, `channels` an iteration."""

    columns: int
    channels: int
    num_warps: int
    num_stages: int

    def of(self, weights: torch.Tensor) -> TensorDescriptor:
        """Describe [rows of all experts, channels], which the copy engine brings in tiles."""
        return TensorDescriptor.from_tensor(weights, [self.columns, self.channels])


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both products; `pairs` of one expert share its weights once they are read."""

    pairs: int
    gate_up: ProductTiles
    down: ProductTiles


TILES = {
    16: (ProductTiles(64, 128, 4, 3), ProductTiles(128, 128, 4, 3)),
    32: (ProductTiles(64, 128, 4, 3), ProductTiles(128, 128, 4, 3)),
    64: (ProductTiles(128, 64, 4, 4), ProductTiles(256, 64, 4, 4)),
    128: (ProductTiles(128, 64, 8, 3), ProductTiles(256, 64, 8, 3)),
}
"""Those of both products, of 16-bit weights and more rows, by the pairs of a tile."""


def choose_expert_tiles(num_rows: int, pairs_each: float, element_size: int) -> ExpertTiles:
    """Returns tiles that fit shared memory; `pairs_each` is the mean number of pairs an expert has."""
    if element_size == 4:  # no tensor core product: an unrolled one takes long to compile
        return ExpertTiles(16, ProductTiles(32, 32, 4, 2), ProductTiles(32, 32, 4, 2))
    pairs = 16
    if num_rows <= MAX_INVARIANT_ROWS:
        return ExpertTiles(pairs, ProductTiles(32, 128, 4, 4), ProductTiles(64, 128, 4, 3))
    while pairs < max(TILES) and pairs < 2 * pairs_each:
        pairs *= 2
    return ExpertTiles(pairs, *TILES[pairs])
