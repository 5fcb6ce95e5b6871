"""Tile sizes for the products of experts: how many (row, expert) pairs, columns and channels a program takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_INVARIANT_ROWS = 16
"""Up to this number of rows a row's bits do not depend on the number. `few_experts` runs, but `experts` if weights are
narrow or gates clamped. Above, `experts` runs."""


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One program's tile of a product: `columns` of the output, and `channels` in each iteration."""

    columns: int
    channels: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Returns the compile options of a kernel."""
        tile = {"COLUMN_TILE": self.columns, "CHANNEL_TILE": self.channels}
        return tile | {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def of(self, weights: torch.Tensor) -> TensorDescriptor:
        """Describe weights [experts, columns, channels], which the tensor memory accelerator (TMA) loads in tiles."""
        width = self.channels // (4 if weights.dtype is torch.int16 else 1)  # four codes share 16 bits
        return TensorDescriptor.from_tensor(weights.flatten(0, 1), [self.columns, width])


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both products. Up to `pairs` pairs of one expert share a tile, and each read of its weights."""

    pairs: int
    gate_up: ProductTiles
    down: ProductTiles


FEW = ExpertTiles(16, ProductTiles(32, 128, 4, 4), ProductTiles(64, 128, 4, 3))
MANY = (
    ExpertTiles(16, ProductTiles(64, 128, 4, 3), ProductTiles(128, 128, 4, 3)),
    ExpertTiles(32, ProductTiles(64, 128, 4, 3), ProductTiles(128, 128, 4, 3)),
    ExpertTiles(64, ProductTiles(128, 64, 4, 4), ProductTiles(256, 64, 4, 4)),
    ExpertTiles(128, ProductTiles(128, 64, 8, 3), ProductTiles(256, 64, 8, 3)),
)
_OF_CODES = ProductTiles(64, 128, 4, 4)
NARROW = ExpertTiles(16, _OF_CODES, _OF_CODES), ExpertTiles(32, _OF_CODES, _OF_CODES)
"""Tiles for weights of 4 bits: channels are a block, and the weight is on the left, straight from registers."""
MOST_NARROW_PAIRS = 128
"""Up to this mean number of pairs of an expert, weights of 4 bits are widened by the program that multiplies them."""
FLOAT32 = ExpertTiles(16, ProductTiles(32, 32, 4, 2), ProductTiles(32, 32, 4, 2))
"""Tiles for float32. It has no tensor core product, and the unrolled product of a larger tile takes long to compile."""


def choose_expert_tiles(num_rows: int, pairs_each: float, element_size: int, is_narrow: bool = False) -> ExpertTiles:
    """Choose tiles for a number of rows and a type.

    With many rows of a 16-bit type these are the smallest that hold twice `pairs_each` pairs, or the largest.
    `pairs_each` is the mean number of pairs an expert has.
    """
    if is_narrow:
        return NARROW[num_rows > MAX_INVARIANT_ROWS and 2 * pairs_each > NARROW[0].pairs]
    if element_size == 4:
        return FLOAT32
    if num_rows <= MAX_INVARIANT_ROWS:
        return FEW
    return next((tiles for tiles in MANY if tiles.pairs >= 2 * pairs_each), MANY[-1])
