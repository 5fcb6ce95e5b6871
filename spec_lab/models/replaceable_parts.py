"""Parts of a model that may be replaced: each as it is plainly, with the protocol of what may take its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import LayerCache, PagedKVCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.layers import AttentionPart, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.rope import RotaryRows, RotaryTable
from spec_lab.models.scored_tokens import top_probability
from spec_lab.pruning.selection import AllRows


@dataclass(frozen=True, slots=True)
class DraftInput:
    """Norms a token's embedding and a hidden state, and puts them side by side."""

    embedding: torch.Tensor
    embedding_norm: RowsPart
    hidden_norm: RowsPart

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [rows, 2 * hidden_size], and the normed hidden states alone."""
        normed = self.hidden_norm(hidden)
        embedded = self.embedding_norm(F.embedding(token_ids, self.embedding))
        return torch.cat((embedded, normed), dim=-1), normed


@dataclass(slots=True)
class LayerBody:
    """A decoder layer behind its first norm."""

    attention: AttentionPart[LayerCache]
    mlp: RowsPart
    mlp_norm: RowsPart

    def __call__(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn normed rows, and the residual of those that `selection` keeps, into [kept rows, hidden_size]."""
        stream = residual + self.attention(rows, rotary, cache, metadata, selection)
        return stream + self.mlp(self.mlp_norm(stream))

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        """Write the KV of normed rows, and nothing else."""
        self.attention.write(rows, rotary, cache, metadata)


@dataclass(frozen=True, slots=True)
class LikeliestToken:
    """Finds the token that a head thinks likeliest.

    Attributes:
        norm: in front of the head; None where the rows have been normed.
        token_map: [draft vocabulary] ids of the target; None where they are the head's.
    """

    norm: RowsPart | None
    head: Linear
    token_map: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] into [rows] token ids."""
        return self._mapped(self._logits(hidden).argmax(dim=-1))

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn [rows, hidden_size] into [rows] token ids and their probabilities, which the ids of the head share."""
        logits = self._logits(hidden)
        return self._mapped(logits.argmax(dim=-1)), top_probability(logits)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden if self.norm is None else self.norm(hidden))

    def _mapped(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.token_map is None else self.token_map[ids]


class Likeliest(Protocol):
    """Finds the likeliest tokens of rows: a `LikeliestToken` or `TokenClusters`, or what stands in for one."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] into [rows] token ids."""
        ...

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn [rows, hidden_size] into [rows] token ids, and the probability [rows] of each among the scored ones."""
        ...


class Layer(Protocol):
    """A decoder layer as a target calls it: `DecoderLayer.__call__`."""

    def __call__(
        self,
        stream: torch.Tensor,
        rotary: RotaryRows,
        cache: Any,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor: ...


class Body(Protocol):
    """A layer behind its first norm: `LayerBody`, whose words are these."""

    def __call__(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor: ...

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None: ...


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


DraftInputs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """The layer of a draft head, and what stands in front of it.

    Attributes:
        residual_is_normed: the layer adds to the normed hidden state, not to the one it was normed from.
    """

    inputs: DraftInputs
    body: Body
    rotary: RotaryTable
    residual_is_normed: bool

    def __call__(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn [rows] tokens and [rows, hidden_size] hidden states into the live rows' output [live rows,
        hidden_size]."""
        rows, normed = self.inputs(token_ids, hidden)
        rotary = self.rotary.rows(attention.positions)
        if selection.is_empty:
            self.body.write(rows, rotary, cache, attention)
            return hidden[:0]
        residual = selection.residual(normed if self.residual_is_normed else hidden)
        return selection.live(self.body(rows, residual, rotary, cache, attention, selection))


class DraftLayers(Protocol):
    """A `DraftLayer`, or what stands in for one."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor: ...
