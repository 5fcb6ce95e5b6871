"""Lays weights out for the products in C: in panels of 64 outputs, each read front to back."""

from __future__ import annotations

from enum import IntEnum

import torch

PANEL, LANES, TILE_INPUTS = 64, 16, 32


class Layout(IntEnum):
    """Names what panels hold; products.h numbers it likewise."""

    FLOATS = 0
    """[panel][input][64] float32."""

    HALVES = 1
    """The same in bfloat16, outputs j and j + 16 of each 32 side by side."""

    TILES = 2
    """[panel][32 inputs][4 tiles][16 pairs of inputs][16 outputs][2], bfloat16: as tile registers take them."""


def pack(weight: torch.Tensor, has_tiles: bool) -> tuple[torch.Tensor, Layout]:
    """Return a float32 weight [outputs, inputs] as panels, the last one filled up with zeros, and how they lie.

    A weight that is the same in bfloat16 is kept so: nothing is lost, and half of the bytes are read.
    """
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // PANEL)
    filled = weight.new_zeros(num_panels * PANEL, num_inputs)
    filled[:num_outputs] = weight
    narrow = filled.bfloat16()
    if not torch.equal(narrow.float(), filled):
        return filled.view(num_panels, PANEL, num_inputs).transpose(1, 2).contiguous(), Layout.FLOATS
    if has_tiles:
        return _tiles(narrow), Layout.TILES
    # Outputs j and j + 16 are the halves of one lane, each of which is widened by one instruction.
    halves = narrow.view(num_panels, PANEL // (2 * LANES), 2, LANES, num_inputs)
    return halves.permute(0, 4, 1, 3, 2).contiguous(), Layout.HALVES


def _tiles(filled: torch.Tensor) -> torch.Tensor:
    """Return [outputs, inputs] in tiles, inputs filled up with zeros as well."""
    num_outputs, num_inputs = filled.shape
    num_blocks = -(-num_inputs // TILE_INPUTS)
    wide = filled.new_zeros(num_outputs, num_blocks * TILE_INPUTS)
    wide[:, :num_inputs] = filled
    pairs = wide.view(num_outputs // PANEL, PANEL // LANES, LANES, num_blocks, TILE_INPUTS // 2, 2)
    return pairs.permute(0, 3, 1, 4, 2, 5).contiguous()
