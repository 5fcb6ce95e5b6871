"""Parts of a model that a few rows go through in one kernel where an option chooses it, and who replaces them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.protocols import RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.layers import AttentionPart, DecoderLayer, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.plan import LayerPlan
from spec_lab.models.rope import RotaryRows
from spec_lab.models.sandwich import CapLogits, EmbedPerLayer, SandwichParts
from spec_lab.models.top_probability import top_probability


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


DraftInputs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


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
        """Return the context in which a forward of sandwich layers is launched."""
        ...

    def norm(self, norm: RowsPart) -> RowsPart: ...

    def linear(self, linear: Linear) -> Linear: ...

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer: ...

    def body(self, body: LayerBody, plan: LayerPlan) -> Body: ...

    def draft_input(self, part: DraftInput) -> DraftInputs: ...

    def likeliest(self, part: LikeliestToken) -> Likeliest: ...

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

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return part

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return part

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest:
        return part

    def sandwich(self, parts: SandwichParts) -> SandwichParts:
        return parts

    def per_layer_embedding(self, part: EmbedPerLayer) -> EmbedPerLayer:
        return part

    def logit_cap(self, part: CapLogits) -> CapLogits:
        return part


PLAIN = PlainProducts()
