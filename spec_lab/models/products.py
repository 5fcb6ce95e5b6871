"""Parts of a model that a few rows go through in one kernel where an option chooses it, and who replaces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import LayerCache, PagedKVCache
from spec_lab.core.protocols import DraftStart, DraftSteps, RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.layers import AttentionPart, DecoderLayer, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.plan import LayerPlan
from spec_lab.models.rope import RotaryRows, RotaryTable
from spec_lab.models.sandwich import CapLogits, EmbedPerLayer, SandwichParts
from spec_lab.models.top_probability import top_probability
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
    """Is a decoder layer behind its first norm."""

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
    """Is a decoder layer as a target calls it: `DecoderLayer.__call__`."""

    def __call__(
        self,
        stream: torch.Tensor,
        rotary: RotaryRows,
        cache: Any,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor: ...


class Body(Protocol):
    """Is a layer behind its first norm: `LayerBody`, whose words are these."""

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
    """Is all layers of a target: `LayerStack`, whose words are these."""

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
    """Is the layer of a draft head, and what stands in front of it.

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
    """Is a `DraftLayer`, or what stands in for one."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor: ...


class Products(Protocol):
    """Gives a faster part for one of a model, or the same where it has none.

    `plan` is that of the layer the part belongs to: it says what kind the part is of.

    Attributes:
        invariant_rows: the most rows of a forward that `is_row_invariant` speaks of.
    """

    invariant_rows: int

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        """Tell whether a row of such a layer does not depend on the others, of up to `invariant_rows`."""
        ...

    def launching(self) -> AbstractContextManager[None]:
        """Return the context in which a forward is launched whose kernels may be placed early."""
        ...

    def norm(self, norm: RowsPart) -> RowsPart: ...

    def linear(self, linear: Linear) -> Linear: ...

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer: ...

    def body(self, body: LayerBody, plan: LayerPlan) -> Body: ...

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        """Give all layers of a target, each of which is one that `layer` gave."""
        ...

    def draft_input(self, part: DraftInput) -> DraftInputs: ...

    def draft_layer(self, part: DraftLayer, plan: LayerPlan) -> DraftLayers:
        """Give a draft head's layer, of parts that `draft_input` and `body` gave."""
        ...

    def likeliest(self, part: LikeliestToken) -> Likeliest: ...

    def draft_start(self, fuse: Linear, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftStart | None:
        """Give what runs a head's catch-up step at once, of what `linear`, `draft_layer` and `likeliest` gave; None
        where its parts are run one by one."""
        ...

    def draft_steps(self, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftSteps | None:
        """Give what runs a head's steps at once, of what `draft_layer` and `likeliest` gave; None where each is run
        for itself."""
        ...

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest: ...

    def sandwich(self, parts: SandwichParts) -> SandwichParts:
        """Give those of a layer whose halves are normed before and after."""
        ...

    def per_layer_embedding(self, part: EmbedPerLayer) -> EmbedPerLayer: ...

    def logit_cap(self, part: CapLogits) -> CapLogits: ...


class PlainProducts:
    """Leaves every part as it is."""

    invariant_rows = 1

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        return False

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def norm(self, norm: RowsPart) -> RowsPart:
        return norm

    def linear(self, linear: Linear) -> Linear:
        return linear

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer:
        return layer

    def body(self, body: LayerBody, plan: LayerPlan) -> Body:
        return body

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        return stack

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return part

    def draft_layer(self, part: DraftLayer, plan: LayerPlan) -> DraftLayers:
        return part

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return part

    def draft_start(self, fuse: Linear, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftStart | None:
        return None

    def draft_steps(self, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftSteps | None:
        return None

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest:
        return part

    def sandwich(self, parts: SandwichParts) -> SandwichParts:
        return parts

    def per_layer_embedding(self, part: EmbedPerLayer) -> EmbedPerLayer:
        return part

    def logit_cap(self, part: CapLogits) -> CapLogits:
        return part


PLAIN = PlainProducts()
