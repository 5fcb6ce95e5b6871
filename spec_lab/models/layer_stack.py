"""The stack of a target's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.core.kept import ALL_ROWS
from spec_lab.core.passes import Pass
from spec_lab.models.rope import RotaryTable


class Layer(Protocol):
    """A decoder layer: `DecoderLayer`, or a kernel that replaces it."""

    def __call__(self, stream: torch.Tensor, at: Pass, rows: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Runs the layers of a target one after another.

    Attributes:
        rotary_tables: the rotary tables; `table_of_layer` has the index of each layer's table.
    """

    layers: Sequence[Layer]
    rotary_tables: Sequence[RotaryTable]
    table_of_layer: Sequence[int]

    def __call__(
        self, stream: torch.Tensor, at: Pass, tapped: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Turn the residual stream [rows, hidden_size] into [kept rows, hidden_size], and return it with the inputs of
        the layers `tapped`.

        `kept` is for the last layer; the others drop no row.
        """
        rotary = [table.rows(at.metadata.positions) for table in self.rotary_tables]
        taps: list[torch.Tensor] = []
        last_layer = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if index in tapped:
                taps.append(stream)
            kept = at.kept if index == last_layer else ALL_ROWS
            turns = rotary[self.table_of_layer[index]]
            stream = layer(stream, Pass(at.cache.layers[index], at.metadata, kept, turns))
        return stream, taps


class Stack(Protocol):
    """All layers of a target: `LayerStack`, or a kernel that replaces it."""

    def __call__(
        self, stream: torch.Tensor, at: Pass, tapped: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]: ...
