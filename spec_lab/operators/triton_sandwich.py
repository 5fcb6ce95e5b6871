"""kernels=triton for layers whose halves have a norm both before and after (Gemma 4).

With up to 16 rows a half consists of two products, the kernels between them, and one kernel that ends it: the norm
after it, the residual, and after attention the norm before the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.gate import gated
from spec_kernels.layer_embedding import layer_embeddings
from spec_kernels.norms import add_normed
from spec_kernels.product_tiles import INVARIANT_ROWS, most_rows
from spec_kernels.softcap import softcap
from spec_lab.models.linear import Linear, gelu_tanh
from spec_lab.models.sandwich import (
    AddNormed,
    AddNormedThenNorm,
    PerLayerEmbedding,
    PerLayerGate,
    Sandwich,
    SandwichParts,
)
from spec_lab.operators.prompt_rounding import are_few
from spec_lab.operators.triton_linear import ACTIVATIONS, SkinnyLinear, SkinnyMLP, SkinnyProduct, TritonNorm, dense


def triton_sandwich(parts: SandwichParts, max_rows: int) -> Sandwich:
    """Replace a layer's parts by kernels. The library computes products of more than `max_rows` rows, and those with
    small weights from 17 rows on."""
    project, mlp = parts.project, parts.mlp
    return Sandwich(
        project=SkinnyLinear(dense(project.linear), max_rows, project.norm),
        output=SkinnyLinear(dense(parts.output), max_rows),
        after_attention=TritonAddNormedThenNorm.of(parts.after_attention),
        mlp=SkinnyMLP(mlp, min(max_rows, most_rows(*dense(mlp.gate_up).weight.shape))),
        after_mlp=TritonAddNormed.of(parts.after_mlp),
        gate=None if parts.gate is None else SkinnyGate(parts.gate, max_rows),
        after_gate=None if parts.after_gate is None else TritonAddNormed.of(parts.after_gate),
    )


@dataclass(frozen=True, slots=True)
class TritonAddNormed:
    """`AddNormed` in one launch."""

    norm: TritonNorm
    scale: torch.Tensor | None

    def __call__(self, stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        out, _ = add_normed(stream, added, self.norm.weight, self.norm.eps, self.scale, None, 0.0)
        return out

    @classmethod
    def of(cls, plain: AddNormed) -> TritonAddNormed:
        return cls(TritonNorm.of(plain.norm), plain.scale)


@dataclass(frozen=True, slots=True)
class TritonAddNormedThenNorm:
    """`AddNormedThenNorm` in one launch."""

    add: TritonAddNormed
    next_norm: TritonNorm

    def __call__(self, stream: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.add.norm, self.next_norm
        return add_normed(stream, added, first.weight, first.eps, self.add.scale, second.weight, second.eps)

    @classmethod
    def of(cls, plain: AddNormedThenNorm) -> TritonAddNormedThenNorm:
        return cls(TritonAddNormed.of(plain.add), TritonNorm.of(plain.next_norm))


class SkinnyGate:
    """`PerLayerGate` as two of our products if rows are few."""

    __slots__ = ("_few", "_many", "_max_rows", "_projection")

    def __init__(self, plain: PerLayerGate, max_rows: int) -> None:
        self._few = SkinnyProduct(dense(plain.gate), activation=gelu_tanh)
        self._many = plain.gate
        self._projection = SkinnyLinear(dense(plain.projection), max_rows)
        self._max_rows = min(max_rows, INVARIANT_ROWS)

    def __call__(self, stream: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        if are_few(stream, self._max_rows):
            return self._projection(self._few(stream, multiplied=embedded))
        return self._projection(gated(self._many(stream), embedded, ACTIVATIONS[gelu_tanh]))


@dataclass(frozen=True, slots=True)
class TritonPerLayerEmbedding:
    """`PerLayerEmbedding` in a product and a kernel."""

    plain: PerLayerEmbedding
    projection: Linear
    norm: TritonNorm

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        plain = self.plain
        return layer_embeddings(
            token_ids,
            plain.table,
            plain.table_scale,
            self.projection(embedded),
            plain.projection_scale,
            self.norm.weight,
            self.norm.eps,
            plain.scale,
        )


@dataclass(frozen=True, slots=True)
class TritonLogitCap:
    """`LogitCap` in one launch."""

    cap: float

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return softcap(logits, self.cap)
