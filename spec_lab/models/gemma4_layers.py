"""The layers of a Gemma 4 target (Google, 2026; `gemma4` in transformers, SGLang and vLLM).

Attention and MLP each have a norm before and a norm after them. At the layer's end the residual stream is multiplied
by a scalar. Queries, keys and values are normed, so attention needs no scale. A norm with a weight multiplies by it in
float32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.models.gemma4_experts import ExpertsBeside, build_experts_beside
from spec_lab.models.layers import Attention, FusedRopeAndWrite, RopeAndWrite
from spec_lab.models.linear import GatedMLP, Linear, fused_linear, gelu_tanh, make_linear
from spec_lab.models.norms import Float32Norm, head_weights
from spec_lab.models.partition import Partition
from spec_lab.models.queries import norm_and_turn_queries
from spec_lab.models.sandwich import (
    AddNormed,
    AddNormedThenNorm,
    NormedLinear,
    PerLayerGate,
    Sandwich,
    SandwichParts,
)

ATTENTION_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class NormedRopeAndWrite:
    """Norms queries, keys and values, rotates queries and keys, and writes keys and values to the KV cache.

    The last `num_kv_heads` heads of the fused projection are the values. They come from v_proj, or from k_proj if the
    layer has no v_proj. Their norm has no weight, and they are not rotated.

    Attributes:
        weight: [num_heads + num_kv_heads, head_dim] float32, the weights of the queries' norm and of the keys'.
    """

    num_heads: int
    num_kv_heads: int
    weight: torch.Tensor
    eps: float
    backend: AttentionBackend

    def __call__(self, heads: torch.Tensor, at: Pass) -> torch.Tensor:
        normed = F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps)
        qk = at.rotary((normed[:, : self.num_heads + self.num_kv_heads] * self.weight).to(heads.dtype))
        values = normed[:, -self.num_kv_heads :].to(heads.dtype)
        self.backend.write(at.cache, at.metadata, qk[:, self.num_heads :], values)
        return qk[:, : self.num_heads]


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """A layer of up to three parts: attention, the MLP, and a gate with the layer's own embedding.

    Attributes:
        parts: norms, projections and MLP; `parts.gate` is None in models without per-layer embeddings.
        beside: the experts that run beside the dense MLP; None in a dense layer.
    """

    attention: Attention
    parts: Sandwich
    beside: ExpertsBeside | None

    def __call__(self, stream: torch.Tensor, embedded: torch.Tensor | None, at: Pass) -> torch.Tensor:
        """Turn the residual stream [rows, hidden_size] into [selected rows, hidden_size], possibly no rows.

        `embedded` [rows, per_layer_width] is the layer's own embedding of the tokens.
        """
        parts = self.parts
        projected = parts.project(stream)
        if at.kept.is_empty:
            self.attention.write_projected(projected, at)
            return stream[:0]
        attended = parts.output(self.attention.attended(projected, at))
        stream, normed = parts.after_attention(at.kept.residual(stream), attended)
        out = parts.mlp(normed)
        if self.beside is not None:
            out = self.beside(stream, out)
        stream = parts.after_mlp(stream, out)
        if parts.gate is not None:
            assert embedded is not None and parts.after_gate is not None
            stream = parts.after_gate(stream, parts.gate(stream, at.kept.residual(embedded)))
        return stream


def build_gemma4_layer(
    config: ModelConfig,
    plan: LayerPlan,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    partition: Partition,
    kernels: KernelSet,
) -> Gemma4Layer:
    """Build a layer from Hugging Face names below `prefix`, which ends in a dot.

    `plan` and `tensors` hold this process's share of the layer, as `partition` splits it.
    """
    eps = config.rms_norm_eps
    attention = build_gemma4_attention(plan, eps, tensors, f"{prefix}self_attn.", backend, partition)
    experts = None if plan.experts is None else build_experts_beside(plan.experts, eps, tensors, prefix, kernels)
    parts = build_gemma4_parts(config, attention, tensors, prefix, partition)
    return Gemma4Layer(attention, kernels.get(Op.SANDWICH, parts), experts)


def build_gemma4_parts(
    config: ModelConfig,
    attention: Attention,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    partition: Partition,
) -> SandwichParts:
    """Build the parts of a layer that map each row by itself, from names below `prefix`, which ends in a dot."""
    scalar = tensors[f"{prefix}layer_scalar"]

    def linear(name: str) -> Linear:
        return make_linear(tensors[f"{prefix}{name}.weight"])

    def norm(name: str) -> Float32Norm:
        return Float32Norm(tensors[f"{prefix}{name}.weight"], config.rms_norm_eps)

    gate_up = fused_linear([tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    down = partition.output(tensors[f"{prefix}mlp.down_proj.weight"])
    is_gated = config.gemma4 is not None and config.gemma4.per_layer_width > 0
    return SandwichParts(
        project=NormedLinear(norm("input_layernorm"), attention.qkv),
        output=attention.o,
        after_attention=AddNormedThenNorm(
            AddNormed(norm("post_attention_layernorm")), norm("pre_feedforward_layernorm")
        ),
        mlp=GatedMLP(gate_up, down, gelu_tanh),
        after_mlp=AddNormed(norm("post_feedforward_layernorm"), None if is_gated else scalar),
        gate=PerLayerGate(linear("per_layer_input_gate"), linear("per_layer_projection")) if is_gated else None,
        after_gate=AddNormed(norm("post_per_layer_input_norm"), scalar) if is_gated else None,
    )


def build_gemma4_attention(
    plan: LayerPlan,
    eps: float,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    partition: Partition,
) -> Attention:
    """Fuse the layer's projections: q, k and v; or q and k, if k_proj also makes the values; or only q."""
    projections = [tensors[name] for part in "qkv" if (name := f"{prefix}{part}_proj.weight") in tensors]
    return Attention(
        qkv=fused_linear(projections),
        o=partition.output(tensors[f"{prefix}o_proj.weight"]),
        num_heads=plan.num_heads,
        head_dim=plan.head_dim,
        scale=ATTENTION_SCALE,
        rope_and_write=_rope_and_write(plan, eps, tensors, prefix, backend),
        backend=backend,
        window=plan.window,
    )


def _rope_and_write(
    plan: LayerPlan, eps: float, tensors: Mapping[str, torch.Tensor], prefix: str, backend: AttentionBackend
) -> RopeAndWrite:
    """Choose the code between projections and attention: the backend's fused kernel if it has one, else torch."""
    query_weight = tensors[f"{prefix}q_norm.weight"]
    if plan.kv_owner is not None:
        return norm_and_turn_queries(Float32Norm(query_weight, eps), plan.num_heads, backend)
    weight = head_weights(query_weight, tensors[f"{prefix}k_norm.weight"], plan.num_heads, plan.num_kv_heads).float()
    if backend.rope_write is None:
        return NormedRopeAndWrite(plan.num_heads, plan.num_kv_heads, weight, eps, backend=backend)
    return FusedRopeAndWrite(plan.num_heads, plan.num_kv_heads, backend.rope_write, weight, eps=eps, norms_values=True)
