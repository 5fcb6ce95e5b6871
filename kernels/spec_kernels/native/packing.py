"""Lays weights out for the products in C: in panels of 64 outputs, each read front to back, and reads them back."""

from __future__ import annotations

from enum import IntEnum

import torch

PANEL, LANES, BLOCK_INPUTS = 64, 16, 32
BLOCK = 64 * PANEL
"""So many outputs are laid out at once, so that a large weight needs little memory beside itself and its panels."""
RESERVED = 2**26
"""So many bytes are asked for at once; those that nothing is laid into take none of the machine's memory."""


class Layout(IntEnum):
    """Names what panels hold; products.h numbers it likewise."""

    FLOATS = 0
    """[panel][4][input][16] float32."""

    HALVES = 1
    """[panel][4][32 inputs][16 pairs of inputs][16 outputs][2], bfloat16."""

    TILES = 2
    """The same, for tile registers."""


def pack(weight: torch.Tensor, has_tiles: bool) -> tuple[torch.Tensor, Layout]:
    """Return a float32 weight [outputs, inputs] as panels, the last one filled up with zeros, and how they lie.

    A weight that is the same in bfloat16 is kept so: nothing is lost, and half of the bytes are read.
    """
    is_narrow = all(torch.equal(block.bfloat16().float(), block) for block in weight.split(BLOCK))
    narrow_layout = Layout.TILES if has_tiles else Layout.HALVES
    layout = narrow_layout if is_narrow else Layout.FLOATS
    panels: torch.Tensor | None = None
    for first, block in zip(range(0, len(weight), BLOCK), weight.split(BLOCK), strict=True):
        laid = (_halves if is_narrow else _floats)(_filled(block))
        if panels is None:
            panels = laid.new_empty(-(-len(weight) // PANEL), *laid.shape[1:])
        panels[first // PANEL : first // PANEL + len(laid)] = laid
    assert panels is not None, "a weight has outputs"
    return panels, layout


def unpack(panels: torch.Tensor, layout: Layout, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Return the weight [outputs, inputs] that was laid out so, in float32."""
    if layout is Layout.FLOATS:
        rows = panels.transpose(2, 3).reshape(-1, num_inputs)
    else:
        rows = panels.permute(0, 1, 4, 2, 3, 5).reshape(len(panels) * PANEL, -1)
    return rows[:num_outputs, :num_inputs].float().contiguous()


class PanelMemory:
    """Hands out memory piece behind piece: what a product asks for ahead of its end is then what the next one reads."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8 behind what was taken last, where it has room."""
        if len(self._free) < num_bytes:
            self._free = torch.empty(max(num_bytes, RESERVED), dtype=torch.uint8)
        taken, self._free = self._free.split([num_bytes, len(self._free) - num_bytes])
        return taken


def _filled(block: torch.Tensor) -> torch.Tensor:
    """Return whole panels, filled up with zeros."""
    missing = -len(block) % PANEL
    return torch.nn.functional.pad(block, (0, 0, 0, missing)) if missing else block


def _floats(filled: torch.Tensor) -> torch.Tensor:
    return filled.view(-1, PANEL // LANES, LANES, filled.shape[1]).transpose(2, 3)


def _halves(filled: torch.Tensor) -> torch.Tensor:
    """Make pairs of inputs the halves of a lane, each widened by one instruction, and fill inputs up as well."""
    num_outputs, num_inputs = filled.shape
    num_blocks = -(-num_inputs // BLOCK_INPUTS)
    wide = torch.nn.functional.pad(filled.bfloat16(), (0, num_blocks * BLOCK_INPUTS - num_inputs))
    pairs = wide.view(num_outputs // PANEL, PANEL // LANES, LANES, num_blocks, BLOCK_INPUTS // 2, 2)
    return pairs.permute(0, 1, 3, 4, 2, 5)
