"""Where a layer drops unread rows, and how many rows are left. Imports no torch."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Drop(Enum):
    """The place, behind a layer's KV write, where the layer drops the rows that nobody reads.

    The catch-up step of `drafters.block_context` only writes KV. There AFTER_LAYER means that rejected rows are written
    too.
    """

    NOTHING = auto()
    AFTER_LAYER = auto()
    AFTER_ATTENTION = auto()
    BEFORE_ATTENTION = auto()
    EVERYTHING = auto()

    @property
    def is_inside(self) -> bool:
        """Return whether rows are dropped inside the layer: all of them, or all but the live ones."""
        return self not in (Drop.NOTHING, Drop.AFTER_LAYER)


class LayerRows(NamedTuple):
    """The rows that parts of a layer compute: queries of attention, its output product, and the MLP."""

    attention: int
    output: int
    mlp: int

    @classmethod
    def of(cls, drop: Drop, num_live: int, num_rows: int) -> LayerRows:
        """Count them for a layer of `num_rows` rows, of which `num_live` are read."""
        attending = num_live if drop is Drop.BEFORE_ATTENTION else num_rows
        going_on = num_live if drop.is_inside else num_rows
        return cls(attending, going_on, going_on)
