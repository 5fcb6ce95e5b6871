"""The layers of a Gemma 4 target (Google, 2026; `gemma4` in transformers, SGLang and vLLM).

Each half is normed before and after, and the whole stream is scaled behind them. Queries, keys and values are normed,
so that attention needs no scale. All norms multiply by their weight in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.protocols import AttentionBackend, RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.config import ModelConfig
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.gemma4_experts import build_dense_and_experts
from spec_lab.models.layers import (
    Attention,
    GatedMLP,
    RopeAndWrite,
    RotaryRows,
    RowsPart,
    expert_parts,
    fused_linear,
    gelu_tanh,
)
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.norms import Float32Norm
from spec_lab.models.partition import Partition
from spec_lab.models.plan import LayerPlan

ATTENTION_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class NormedRopeAndWrite:
    """Norms heads of every kind, rotates queries and keys, and writes KV.

    Values are the last `num_kv_heads` of the product: v_proj's, or those of k_proj where the layer has no v_proj. They
    have a norm without a weight, and no rotation.

    Attributes:
        weight: [num_heads + num_kv_heads, head_dim] float32, of the queries' norm and of the keys'.
    """

    num_heads: int
    num_kv_heads: int
    weight: torch.Tensor
    eps: float
    backend: AttentionBackend

    def __call__(
        self, heads: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        normed = F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps)
        qk = rotary((normed[:, : self.num_heads + self.num_kv_heads] * self.weight).to(heads.dtype))
        values = normed[:, -self.num_kv_heads :].to(heads.dtype)
        self.backend.write(cache, metadata, qk[:, self.num_heads :], values)
        return qk[:, : self.num_heads]


@dataclass(frozen=True, slots=True)
class NormedQueries:
    """Norms and rotates queries, for a layer that reads another one's KV: nothing is written."""

    norm: Float32Norm

    def __call__(
        self, heads: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        return rotary(self.norm(heads))


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """Lets the rows choose from the layer's own embedding of their tokens."""

    gate: Linear
    projection: Linear
    norm: Float32Norm

    def __call__(self, stream: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Turn [rows, hidden_size] and [rows, per_layer_width] into what is added to the stream."""
        return self.norm(self.projection(gelu_tanh(self.gate(stream)) * embedded))


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """A layer whose first half attends, and whose second and third work on each row; `per_layer` may be missing."""

    attention_norm: Float32Norm
    attention: Attention
    post_attention_norm: Float32Norm
    feedforward: RowsPart
    post_feedforward_norm: Float32Norm
    per_layer: PerLayerGate | None
    scalar: torch.Tensor

    def __call__(
        self,
        stream: torch.Tensor,
        embedded: torch.Tensor | None,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn the [rows, hidden_size] residual stream into [kept rows, hidden_size], which may be no row at all.

        `embedded` is the layer's own embedding [rows, per_layer_width].
        """
        rows = self.attention_norm(stream)
        if selection.is_empty:
            self.attention.write(rows, rotary, cache, metadata)
            return stream[:0]
        attended = self.attention(rows, rotary, cache, metadata, selection)
        stream = selection.residual(stream) + self.post_attention_norm(attended)
        stream = stream + self.post_feedforward_norm(self.feedforward(stream))
        if self.per_layer is not None:
            assert embedded is not None
            stream = stream + self.per_layer(stream, selection.residual(embedded))
        return stream * self.scalar

    @property
    def expert_parts(self) -> tuple[ExpertMLP, ...]:
        return expert_parts(self.feedforward)


@dataclass(frozen=True, slots=True)
class NormedMLP:
    """A dense MLP behind its norm."""

    norm: Float32Norm
    mlp: GatedMLP

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(rows))


def build_gemma4_layer(
    config: ModelConfig,
    plan: LayerPlan,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    partition: Partition,
) -> Gemma4Layer:
    """Build a layer from Hugging Face names below `prefix`, which ends in a dot.

    `plan` and `tensors` are those of the process's share, as `partition` cuts them.
    """
    sizes, eps = config.gemma4, config.rms_norm_eps
    assert sizes is not None

    def linear(name: str) -> Linear:
        return make_linear(tensors[f"{prefix}{name}.weight"])

    def norm(name: str) -> Float32Norm:
        return Float32Norm(tensors[f"{prefix}{name}.weight"], eps)

    gate = (
        PerLayerGate(linear("per_layer_input_gate"), linear("per_layer_projection"), norm("post_per_layer_input_norm"))
        if sizes.per_layer_width
        else None
    )
    return Gemma4Layer(
        attention_norm=norm("input_layernorm"),
        attention=_build_attention(plan, eps, tensors, f"{prefix}self_attn.", backend, partition),
        post_attention_norm=norm("post_attention_layernorm"),
        feedforward=_build_feedforward(plan, eps, tensors, prefix, partition),
        post_feedforward_norm=norm("post_feedforward_layernorm"),
        per_layer=gate,
        scalar=tensors[f"{prefix}layer_scalar"],
    )


def _build_attention(
    plan: LayerPlan,
    eps: float,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    partition: Partition,
) -> Attention:
    """Fuse the projections that the layer has: q, k and v; q and k, where values are keys; or q alone."""
    projections = [tensors[name] for part in "qkv" if (name := f"{prefix}{part}_proj.weight") in tensors]
    return Attention(
        qkv=fused_linear(projections),
        o=partition.output(tensors[f"{prefix}o_proj.weight"]),
        num_heads=plan.num_heads,
        head_dim=plan.head_dim,
        rope_and_write=_rope_and_write(plan, eps, tensors, prefix, backend),
        backend=backend,
        window=plan.window,
        scale=ATTENTION_SCALE,
    )


def _rope_and_write(
    plan: LayerPlan, eps: float, tensors: Mapping[str, torch.Tensor], prefix: str, backend: AttentionBackend
) -> RopeAndWrite:
    query_weight = tensors[f"{prefix}q_norm.weight"]
    if plan.kv_owner is not None:
        return NormedQueries(Float32Norm(query_weight, eps))
    key_weight = tensors[f"{prefix}k_norm.weight"]
    weight = torch.cat((query_weight.expand(plan.num_heads, -1), key_weight.expand(plan.num_kv_heads, -1)))
    return NormedRopeAndWrite(plan.num_heads, plan.num_kv_heads, weight.float(), eps, backend)


def _build_feedforward(
    plan: LayerPlan, eps: float, tensors: Mapping[str, torch.Tensor], prefix: str, partition: Partition
) -> RowsPart:
    names = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    gate, up, down = (tensors[name] for name in names)
    mlp = GatedMLP(fused_linear([gate, up]), partition.output(down), gelu_tanh)
    dense = NormedMLP(Float32Norm(tensors[f"{prefix}pre_feedforward_layernorm.weight"], eps), mlp)
    return dense if plan.experts is None else build_dense_and_experts(plan.experts, eps, dense, tensors, prefix)
