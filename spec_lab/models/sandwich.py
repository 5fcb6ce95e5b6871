"""The parts of layers whose halves have a norm before and after (Gemma 4 targets and assistants).

Each part groups operations that one or two kernels can compute together, so that a kernel set can replace it.
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
    """Ends a part of a layer: norms its output and adds it to the residual stream, which may then be scaled.

    Attributes:
        scale: [1]; None for no scale.
    """

    norm: WeightedNorm
    scale: torch.Tensor | None = None

    def __call__(self, stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        stream = stream + self.norm(added)
        return stream if self.scale is None else stream * self.scale


@dataclass(frozen=True, slots=True)
class AddNormedThenNorm:
    """Ends a half of a layer, and norms the input of the next half."""

    add: AddNormed
    next_norm: WeightedNorm

    def __call__(self, stream: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream, and its norm."""
        stream = self.add(stream, added)
        return stream, self.next_norm(stream)


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """Gates the layer's own embedding of each token by the token's row."""

    gate: Linear
    projection: Linear

    def __call__(self, stream: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] and [rows, per_layer_width] into [rows, hidden_size]."""
        return self.projection(gelu_tanh(self.gate(stream)) * embedded)


Ending = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Adds a part of a layer to the residual stream: `AddNormed`, or a kernel that replaces it."""


@dataclass(frozen=True, slots=True)
class Sandwich:
    """All parts of a layer that map each row by itself, except experts.

    Attributes:
        project: the norm before attention, and attention's first product.
        output: attention's last product.
        after_attention: returns the residual stream, and the input of `mlp`.
        after_mlp: returns the residual stream.
        gate: gates the layer's own embedding; None if there is none, and then `after_gate` is None too.
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
    """The parts of a `Sandwich` in torch, from which a set of kernels makes its own."""

    project: NormedLinear
    after_attention: AddNormedThenNorm
    mlp: GatedMLP
    after_mlp: AddNormed
    gate: PerLayerGate | None = None
    after_gate: AddNormed | None = None


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """Computes an embedding of the tokens for each layer: a table lookup plus a projection of the shared embedding.

    Attributes:
        table: [vocab, num_layers * width].
        table_scale: rounded to the weights' dtype.
    """

    table: torch.Tensor
    table_scale: float
    projection: Linear
    projection_scale: float
    norm: WeightedNorm
    width: int
    scale: float = 2**-0.5

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Turn tokens [rows] and their scaled embeddings [rows, hidden_size] into [rows, num_layers, width]."""
        of_token = F.embedding(token_ids, self.table) * self.table_scale
        of_context = self.projection(embedded) * self.projection_scale
        normed = self.norm(of_context.unflatten(-1, (-1, self.width)))
        return (normed + of_token.unflatten(-1, (-1, self.width))) * self.scale


EmbedPerLayer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A `PerLayerEmbedding`, or a kernel that replaces it."""


CapLogits = Callable[[torch.Tensor], torch.Tensor]
"""A `LogitCap`, or a kernel that replaces it."""


@dataclass(frozen=True, slots=True)
class LogitCap:
    """Caps logits in float32, since rounding near the cap would make ties."""

    cap: float

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tanh(logits.float() / self.cap) * self.cap
