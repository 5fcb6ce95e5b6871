"""The attention of families other than Qwen3, as trained: with an output gate (Qwen3.5), and latent (DeepSeek-V3).

Both have the two sides of `HeadsAttention`, so that a target's layer and a draft module's are the same code. Their
parameters have the names and shapes of checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.train.layers import (
    AttentionShape,
    HeadsAttention,
    Rotation,
    SelfAttention,
    TrainableRMSNorm,
    split_heads,
)


def attention_of(plan: LayerPlan, hidden_size: int, eps: float) -> SelfAttention | LatentSelfAttention:
    """Return the attention that a layer's plan names."""
    if plan.latent is not None:
        return LatentSelfAttention(plan, hidden_size, eps)
    norm_eps = eps if plan.qk_norm else None
    heads = plan.num_heads, plan.num_kv_heads, plan.head_dim
    shape = AttentionShape(hidden_size, hidden_size, *heads, norm_eps, plan.qkv_bias)
    return GatedSelfAttention(shape) if plan.attention_gate else SelfAttention(shape)


def rotation_of(plan: LayerPlan, num_rows: int, device: torch.device) -> Rotation:
    """Return the rotary embedding of a layer's rows 0.. ."""
    rope = plan.rope
    if rope.scaling == "proportional":
        return Rotation.of_rows(num_rows, plan.head_dim, rope.theta, device, rope.partial_rotary_factor)
    assert rope.scaling == "none", "a small target needs no long positions"
    return Rotation.of_rows(num_rows, int(plan.head_dim * rope.partial_rotary_factor), rope.theta, device)


def attend(attention: HeadsAttention, rows: Tensor, rotation: Rotation) -> Tensor:
    """Attend causally over whole rows `[batch, rows, hidden]`."""
    query, key, value = attention.project(rows, rotation)
    return attention.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True), rows)


class GatedSelfAttention(SelfAttention):
    """Attention whose heads' outputs pass a gate (Qwen3-Next): `q_proj` has of each head the query's rows and then the
    gate's."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.q_proj = nn.Linear(shape.input_size, 2 * shape.num_heads * shape.head_dim, bias=False)

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        query = rotation.apply(self.q_norm(split_heads(F.linear(hidden, self._half(0)), self.head_dim)))
        key = rotation.apply(self.k_norm(split_heads(self.k_proj(hidden), self.head_dim)))
        value = split_heads(self.v_proj(hidden), self.head_dim)
        queries_per_key = query.shape[1] // key.shape[1]
        return query, key.repeat_interleave(queries_per_key, 1), value.repeat_interleave(queries_per_key, 1)

    def merge(self, attended: Tensor, rows: Tensor) -> Tensor:
        gate = F.linear(rows, self._half(1)).sigmoid()
        return self.o_proj(attended.transpose(1, 2).flatten(2) * gate)

    def _half(self, index: int) -> Tensor:
        """Return the queries' (0) or the gate's (1) rows of `q_proj`, head by head."""
        return self.q_proj.weight.unflatten(0, (-1, 2, self.head_dim))[:, index].flatten(0, 1)


class LatentSelfAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), keys and values of all heads unfolded."""

    def __init__(self, plan: LayerPlan, hidden_size: int, eps: float) -> None:
        super().__init__()
        assert plan.latent is not None
        self.sizes = sizes = plan.latent
        assert sizes.q_lora_rank is None and not sizes.bias and sizes.mscale == 1.0, "the recipes have none of these"
        self.q_proj = nn.Linear(hidden_size, plan.num_heads * sizes.query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, sizes.row_width, bias=False)
        self.kv_a_layernorm = TrainableRMSNorm(sizes.kv_lora_rank, eps)
        unfolded = plan.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, unfolded, bias=False)
        self.o_proj = nn.Linear(plan.num_heads * sizes.v_head_dim, hidden_size, bias=False)

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.sizes
        rotated = sizes.qk_rope_head_dim
        plain, turning = split_heads(self.q_proj(hidden), sizes.query_width).split(
            [sizes.qk_nope_head_dim, rotated], dim=-1
        )
        query = torch.cat([plain, rotation.apply(self._halves(turning))], dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(hidden).split([sizes.kv_lora_rank, rotated], dim=-1)
        unfolded = split_heads(self.kv_b_proj(self.kv_a_layernorm(latent)), sizes.qk_nope_head_dim + sizes.v_head_dim)
        own, value = unfolded.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        turned = rotation.apply(self._halves(shared).unsqueeze(1)).expand(-1, own.shape[1], -1, -1)
        return query, torch.cat([own, turned.to(own.dtype)], dim=-1), value

    def merge(self, attended: Tensor, rows: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _halves(self, turning: Tensor) -> Tensor:
        """Return channels that lie as the pairs (0, 1), (2, 3), ... in the order in which a rotation takes them."""
        if not self.sizes.interleaved:
            return turning
        return turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
