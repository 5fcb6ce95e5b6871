"""Packs weights for the products in C into panels of 64 outputs, and unpacks them."""

from __future__ import annotations

from enum import IntEnum

import torch

PANEL, LANES, BLOCK_INPUTS = 64, 16, 32
BLOCK = 64 * PANEL
"""The number of outputs packed at once, so that packing a large weight needs little extra memory."""
RESERVED = 2**26
"""The least number of bytes that are reserved at once. Unused ones take no physical memory."""


class Layout(IntEnum):
    """The layout of panels; products.h has the same numbers."""

    FLOATS = 0
    """[panel][4][input][16] float32."""

    HALVES = 1
    """[panel][4][block of 32 inputs][16 pairs of inputs][16 outputs][2], bfloat16."""

    TILES = 2
    """The same, for tile registers."""


def pack(weight: torch.Tensor, has_tiles: bool) -> tuple[torch.Tensor, Layout]:
    """Pack a float32 weight [outputs, inputs] into zero-padded panels, and return them with their layout.

    If bfloat16 represents the weight exactly, it is stored in bfloat16, which halves the bytes to read.
    """
    is_narrow = all(torch.equal(block.bfloat16().float(), block) for block in weight.split(BLOCK))
    narrow_layout = Layout.TILES if has_tiles else Layout.HALVES
    layout = narrow_layout if is_narrow else Layout.FLOATS
    panels: torch.Tensor | None = None
    for first, block in zip(range(0, len(weight), BLOCK), weight.split(BLOCK), strict=True):
        missing = -len(block) % PANEL
        filled = torch.nn.functional.pad(block, (0, 0, 0, missing)) if missing else block
        laid = (_halves if is_narrow else _floats)(filled)
        if panels is None:
            panels = laid.new_empty(-(-len(weight) // PANEL), *laid.shape[1:])
        panels[first // PANEL : first // PANEL + len(laid)] = laid
    assert panels is not None, "a weight has outputs"
    return panels, layout


def unpack(panels: torch.Tensor, layout: Layout, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Return the packed weight [outputs, inputs] in float32."""
    if layout is Layout.FLOATS:
        rows = panels.transpose(2, 3).reshape(-1, num_inputs)
    else:
        rows = panels.permute(0, 1, 4, 2, 3, 5).reshape(len(panels) * PANEL, -1)
    return rows[:num_outputs, :num_inputs].float().contiguous()


class PanelMemory:
    """Hands out pieces of memory, mostly consecutive ones. Then a product that prefetches past the end of its weight
    prefetches the weight of the next product."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8, directly after the last piece if there is room."""
        if len(self._free) < num_bytes:
            self._free = torch.empty(max(num_bytes, RESERVED), dtype=torch.uint8)
        taken, self._free = self._free.split([num_bytes, len(self._free) - num_bytes])
        return taken


def _floats(filled: torch.Tensor) -> torch.Tensor:
    return filled.view(-1, PANEL // LANES, LANES, filled.shape[1]).transpose(2, 3)


def _halves(filled: torch.Tensor) -> torch.Tensor:
    """Put pairs of inputs into the two halves of a lane, so that one instruction widens each; pad inputs too."""
    num_outputs, num_inputs = filled.shape
    num_blocks = -(-num_inputs // BLOCK_INPUTS)
    wide = torch.nn.functional.pad(filled.bfloat16(), (0, num_blocks * BLOCK_INPUTS - num_inputs))
    pairs = wide.view(num_outputs // PANEL, PANEL // LANES, LANES, num_blocks, BLOCK_INPUTS // 2, 2)
    return pairs.permute(0, 1, 3, 4, 2, 5)
