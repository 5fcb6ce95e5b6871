"""Builds a decoder layer from its plan and tensors with Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spec_lab.checkpoints.keep_narrow import SCALES
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.models.delta_net import GatedDeltaNet, build_delta_net
from spec_lab.models.experts import build_experts
from spec_lab.models.latent import LatentAttention, build_latent_attention
from spec_lab.models.layers import (
    AddNormedPart,
    AddPart,
    AddThenNorm,
    Attention,
    DecoderLayer,
    FusedRopeAndWrite,
    RopeAndWrite,
    RopeThenWrite,
)
from spec_lab.models.linear import GatedMLP, Linear, fused_linear
from spec_lab.models.norms import RowsPart, WeightedNorm, WideHeadNorm, head_weights, make_norm, per_head_norm
from spec_lab.models.partition import WHOLE, Partition


def build_layer(
    plan: LayerPlan,
    eps: float,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    partition: Partition = WHOLE,
    kernels: KernelSet = TORCH_FORMS,
) -> DecoderLayer:
    """Build a layer in torch from Hugging Face names below `prefix` (empty, or ending in a dot).

    `plan` and `tensors` hold this process's share of the layer, as `partition` splits it. `kernels` replace parts that
    are no products.
    """
    mixer: Attention | LatentAttention | GatedDeltaNet
    if plan.delta_net is not None:
        mixer = build_delta_net(plan.delta_net, tensors, f"{prefix}linear_attn.", eps, partition, kernels)
    elif plan.latent is not None:
        mixer = build_latent_attention(
            plan.latent, plan.num_heads, eps, tensors, f"{prefix}self_attn.", backend, plan.window, partition
        )
    else:
        mixer = build_attention(plan, eps, tensors, f"{prefix}self_attn.", backend, partition)

    def norm(name: str) -> WeightedNorm:
        return make_norm(tensors[f"{prefix}{name}_layernorm.weight"], eps, plan.float32_norms)

    mlp: RowsPart
    if plan.experts is None:
        mlp = build_mlp(plan, tensors, f"{prefix}mlp.", partition)
    else:
        mlp = build_experts(plan.experts, tensors, f"{prefix}mlp.", kernels)
    if plan.norms_outputs:
        first = AddNormedPart(mixer.o, norm("post_attention"))
        return DecoderLayer(plan, None, mixer, first.close, finish=AddNormedPart(mlp, norm("post_feedforward")))
    close = AddThenNorm(mixer.o, norm("post_attention"))
    return DecoderLayer(plan, norm("input"), mixer, close, finish=AddPart(mlp))


def build_attention(
    plan: LayerPlan,
    eps: float,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    partition: Partition = WHOLE,
) -> Attention:
    """Build attention over keys and values from Hugging Face names below `prefix` (ending in `self_attn.`).

    `plan` and `tensors` are as in `build_layer`; `eps` is that of the norms.
    """
    projections = _attention_inputs(plan, tensors, prefix, "weight")
    biases = _attention_inputs(plan, tensors, prefix, "bias") if plan.qkv_bias else None
    is_narrow = f"{prefix}q_proj.{SCALES}" in tensors
    return Attention(
        qkv=fused_linear(projections, biases, _attention_inputs(plan, tensors, prefix, SCALES) if is_narrow else None),
        o=_output(tensors, f"{prefix}o_proj.", partition),
        num_heads=plan.num_heads,
        head_dim=plan.head_dim,
        scale=plan.head_dim**-0.5,
        rope_and_write=_rope_and_write(plan, eps, tensors, prefix, backend),
        backend=backend,
        window=plan.window,
        gated=plan.attention_gate,
        sinks=tensors[f"{prefix}sinks"] if plan.sinks else None,
    )


def _output(tensors: Mapping[str, torch.Tensor], prefix: str, partition: Partition) -> Linear:
    """Make the product that ends an attention or an MLP, from the names below `prefix`."""
    return partition.output(tensors[f"{prefix}weight"], tensors.get(f"{prefix}bias"), tensors.get(f"{prefix}{SCALES}"))


def _rope_and_write(
    plan: LayerPlan, eps: float, tensors: Mapping[str, torch.Tensor], prefix: str, backend: AttentionBackend
) -> RopeAndWrite:
    """Return the step that norms, rotates and writes KV: the backend's kernel if it has one, else torch's."""
    num_heads, num_kv_heads = plan.num_heads, plan.num_kv_heads
    weight = None
    if plan.wide_qk_norm:
        weights = (tensors[f"{prefix}{name}.weight"].view(-1, plan.head_dim) for name in ("q_norm", "k_norm"))
        return RopeThenWrite(num_heads, num_kv_heads, backend, WideHeadNorm(torch.cat([*weights]), num_heads, eps))
    if plan.qk_norm:
        q_weight, k_weight = tensors[f"{prefix}q_norm.weight"], tensors[f"{prefix}k_norm.weight"]
        weight = head_weights(q_weight, k_weight, num_heads, num_kv_heads)
    if backend.rope_write is None:
        norm = None if weight is None else per_head_norm(weight, eps, plan.float32_norms)
        return RopeThenWrite(num_heads, num_kv_heads, backend, norm)
    return FusedRopeAndWrite(num_heads, num_kv_heads, backend.rope_write, norm_weight=weight, eps=eps)


def _attention_inputs(
    plan: LayerPlan, tensors: Mapping[str, torch.Tensor], prefix: str, kind: str
) -> list[torch.Tensor]:
    """Return weights, biases or scales of q, k and v, and of the gate if there is one.

    The gate shares q_proj: each head's query rows are followed by its gate's rows.
    """
    q, k, v = (tensors[f"{prefix}{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj"))
    if not plan.attention_gate:
        return [q, k, v]
    query, gate = q.unflatten(0, (plan.num_heads, 2, plan.head_dim)).unbind(1)
    return [query.flatten(0, 1), k, v, gate.flatten(0, 1)]


def build_mlp(
    plan: LayerPlan, tensors: Mapping[str, torch.Tensor], prefix: str, partition: Partition = WHOLE
) -> GatedMLP:
    """Build a dense MLP from Hugging Face names below `prefix` (ending in `mlp.`)."""

    def both(kind: str) -> list[torch.Tensor]:
        return [tensors[f"{prefix}{name}.{kind}"] for name in ("gate_proj", "up_proj")]

    is_narrow = f"{prefix}gate_proj.{SCALES}" in tensors
    biases = both("bias") if plan.mlp_bias else None
    gate_up = fused_linear(both("weight"), biases, both(SCALES) if is_narrow else None)
    return GatedMLP(gate_up, _output(tensors, f"{prefix}down_proj.", partition))
