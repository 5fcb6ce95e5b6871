"""The parts of a layer whose halves are normed before and after (Gemma 4): target's and assistant's are made of them.

Each part says what is computed together, so that `Products` can put a kernel or two in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.models.linear import GatedMLP, Linear, gelu_tanh
from spec_lab.models.norms import RowsPart, WeightedNorm


@dataclass(frozen=True, slots=True)
class NormedLinear:
    """A product of normed rows."""

    norm: WeightedNorm
    linear: Linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(rows))


@dataclass(frozen=True, slots=True)
class AddNormed:
    """Ends a half of a layer: its norm is added to the stream, which is scaled behind a layer's last one.

    Attributes:
        scale: [1]; None is no scale.
    """

    norm: WeightedNorm
    scale: torch.Tensor | None = None

    def __call__(self, stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        stream = stream + self.norm(added)
        return stream if self.scale is None else stream * self.scale


@dataclass(frozen=True, slots=True)
class AddNormedThenNorm:
    """Ends a half of a layer, and norms what the next one reads."""

    add: AddNormed
    next_norm: WeightedNorm

    def __call__(self, stream: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream and its norm."""
        stream = self.add(stream, added)
        return stream, self.next_norm(stream)


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """Lets the rows choose from the layer's own embedding of their tokens."""

    gate: Linear
    projection: Linear

    def __call__(self, stream: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] and [rows, per_layer_width] into [rows, hidden_size]."""
        return self.projection(gelu_tanh(self.gate(stream)) * embedded)


Ending = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Adds a half of a layer to the stream: `AddNormed`, or what stands in its place."""


@dataclass(frozen=True, slots=True)
class Sandwich:
    """Everything of a layer that turns each row by itself.

    Attributes:
        project: the norm before attention, and attention's first product.
        output: attention's last product.
        after_attention: gives the stream, and what `mlp` reads.
        after_mlp: gives the stream.
        gate: of the layer's own embeddings; None where it has none, and so is `after_gate`.
    """

    project: RowsPart
    output: Linear
    after_attention: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    mlp: RowsPart
    after_mlp: Ending
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    after_gate: Ending | None = None


@dataclass(frozen=True, slots=True)
class SandwichParts(Sandwich):
    """The same in torch, from which a set of kernels makes its own."""

    project: NormedLinear
    after_attention: AddNormedThenNorm
    mlp: GatedMLP
    after_mlp: AddNormed
    gate: PerLayerGate | None = None
    after_gate: AddNormed | None = None


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """Gives every layer an embedding of the tokens, one part from the token alone and one from the shared embedding.

    Attributes:
        table: [vocab, num_layers * width].
        table_scale: rounded as the weights are.
    """

    table: torch.Tensor
    table_scale: float
    projection: Linear
    projection_scale: float
    norm: WeightedNorm
    width: int
    scale: float = 2**-0.5

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Turn [rows] tokens and their scaled embeddings [rows, hidden_size] into [rows, num_layers, width]."""
        of_token = F.embedding(token_ids, self.table) * self.table_scale
        of_context = self.projection(embedded) * self.projection_scale
        normed = self.norm(of_context.unflatten(-1, (-1, self.width)))
        return (normed + of_token.unflatten(-1, (-1, self.width))) * self.scale


EmbedPerLayer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A `PerLayerEmbedding`, or what stands in its place."""


CapLogits = Callable[[torch.Tensor], torch.Tensor]
"""A `LogitCap`, or what stands in its place."""


@dataclass(frozen=True, slots=True)
class LogitCap:
    """Caps logits in float32: near the cap, rounding would make ties."""

    cap: float

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tanh(logits.float() / self.cap) * self.cap
