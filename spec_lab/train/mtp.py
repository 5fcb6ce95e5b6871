"""A trainable multi-token-prediction module for a target with plain attention.

A module (DeepSeek-V3, 2024, section 2.2) combines a token's embedding with the hidden state of the position before it,
runs one layer of the target's kind, and uses the target's head. MTP-Eagle uses the same module for every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.train.chain import unroll_chain
from spec_lab.train.layers import AttentionShape, RotaryFrequencies, SelfAttention, SwiGLU, TrainableRMSNorm
from spec_lab.train.packed_rows import RowPlaces
from spec_lab.train.unroll import UnderFrozenHead


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """Sizes of a module. `plan` is that of its layer (`spec_lab.checkpoints.plan`), with plain attention. `hidden_size`
    and `rms_norm_eps` are the target's."""

    plan: LayerPlan
    hidden_size: int
    rms_norm_eps: float

    def make_attention(self) -> SelfAttention:
        """Return the module's own attention."""
        plan = self.plan
        norm_eps = self.rms_norm_eps if plan.qk_norm else None
        return SelfAttention(
            AttentionShape(
                self.hidden_size,
                self.hidden_size,
                plan.num_heads,
                plan.num_kv_heads,
                plan.head_dim,
                norm_eps,
                plan.qkv_bias,
            )
        )


class SharedHead(nn.Module):
    """The norm before the target's head, which the module does not own."""

    def __init__(self, shape: ModuleShape) -> None:
        super().__init__()
        self.norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)


class TrainableMtpModule(nn.Module):
    """One module under the names of its checkpoint; a `ChainLayer`."""

    def __init__(self, shape: ModuleShape) -> None:
        super().__init__()
        self.enorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.input_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = shape.make_attention()
        self.post_attention_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.plan.intermediate_size)
        self.shared_head = SharedHead(shape)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projection of the normed embedding and hidden state, and the same normed for attention."""
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        return joined, self.input_layernorm(joined)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the state after the norm, which is fed back and is also the head's input."""
        hidden = residual + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return self.shared_head.norm(hidden)


class MtpDrafter(UnderFrozenHead):
    """A module, which takes every step, and the target's frozen head."""

    def __init__(self, shape: ModuleShape, head_weight: Tensor) -> None:
        """`head_weight` `[vocab, hidden]` is the weight of the target's head."""
        super().__init__()
        self.shape = shape
        self.module = TrainableMtpModule(shape)
        self.register_buffer("head_weight", head_weight.detach(), persistent=False)
        self.rotary = RotaryFrequencies(shape.plan.rope, shape.plan.head_dim)

    def unroll(
        self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, rows: RowPlaces | None = None
    ) -> list[Tensor]:
        """Unroll the module by `unroll_chain`."""
        (final_hidden,) = features
        rows = rows or RowPlaces.of_one_document(embeddings)
        rotation = self.rotary(rows.positions)
        return unroll_chain([self.module] * num_steps, embeddings, final_hidden.float(), rotation, rows.segments)
