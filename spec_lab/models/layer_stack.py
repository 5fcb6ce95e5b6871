"""The stack of a target's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spec_lab.core.kept import Kept
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.rope import RotaryRows, RotaryTable


class Layer(Protocol):
    """A decoder layer: `DecoderLayer`, or a kernel that replaces it."""

    @property
    def experts(self) -> ExpertMLP | None: ...

    def __call__(
        self,
        stream: torch.Tensor,
        rotary: RotaryRows,
        cache: Any,
        metadata: AttentionMetadata,
        kept: Kept,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


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
        self,
        stream: torch.Tensor,
        cache: PagedKVCache,
        attention: AttentionMetadata,
        kept: Kept,
        tapped: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Turn the residual stream [rows, hidden_size] into [kept rows, hidden_size], and return it with the inputs of
        the layers `tapped`.

        `kept` is for the last layer; the others drop no row.
        """
        rotary = [table.rows(attention.positions) for table in self.rotary_tables]
        taps: list[torch.Tensor] = []
        last_layer = len(self.layers) - 1
        all_rows = Kept()
        for index, layer in enumerate(self.layers):
            if index in tapped:
                taps.append(stream)
            here = kept if index == last_layer else all_rows
            stream = layer(stream, rotary[self.table_of_layer[index]], cache.layers[index], attention, here)
        return stream, taps


class Stack(Protocol):
    """All layers of a target: `LayerStack`, or a kernel that replaces it."""

    def __call__(
        self,
        stream: torch.Tensor,
        cache: PagedKVCache,
        attention: AttentionMetadata,
        kept: Kept,
        tapped: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]: ...
