"""The layers of a target, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.selection import AllRows
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.rope import RotaryRows, RotaryTable


class Layer(Protocol):
    """A decoder layer: `DecoderLayer`, or what stands in for one."""

    @property
    def experts(self) -> ExpertMLP | None: ...

    def __call__(
        self,
        stream: torch.Tensor,
        rotary: RotaryRows,
        cache: Any,
        metadata: AttentionMetadata,
        selection: RowSelection,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Runs the layers of a target one behind the other.

    Attributes:
        rotary_tables: those that layers turn their heads by, of which each layer has one, `table_of_layer`.
    """

    layers: Sequence[Layer]
    rotary_tables: Sequence[RotaryTable]
    table_of_layer: Sequence[int]

    def __call__(
        self,
        stream: torch.Tensor,
        cache: PagedKVCache,
        attention: AttentionMetadata,
        selection: RowSelection,
        tapped: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Turn the stream [rows, hidden_size] into [kept rows, hidden_size], and return beside it what enters the
        layers `tapped`; in the last layer only the rows of `selection` go on."""
        rotary = [table.rows(attention.positions) for table in self.rotary_tables]
        taps: list[torch.Tensor] = []
        last_layer = len(self.layers) - 1
        all_rows = AllRows()
        for index, layer in enumerate(self.layers):
            if index in tapped:
                taps.append(stream)
            kept = selection if index == last_layer else all_rows
            stream = layer(stream, rotary[self.table_of_layer[index]], cache.layers[index], attention, kept)
        return stream, taps


class Stack(Protocol):
    """All layers of a target: `LayerStack`, whose words are these."""

    def __call__(
        self,
        stream: torch.Tensor,
        cache: PagedKVCache,
        attention: AttentionMetadata,
        selection: RowSelection,
        tapped: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]: ...
