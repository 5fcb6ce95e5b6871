"""Multi-token-prediction modules as trained, beside a Qwen3 target.

A module (DeepSeek-V3, 2024, section 2.2) joins a token's embedding with the hidden state before it, passes both through
one layer of the target's kind, and reads the result with the target's own head. MTP-Eagle uses one module again and
again, vanilla MTP one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.core.errors import UserError
from spec_lab.train.attention_kinds import LatentSelfAttention, attention_of
from spec_lab.train.chain import unroll_chain
from spec_lab.train.decoder import mlp_of
from spec_lab.train.layers import AttentionShape, RotaryFrequencies, SelfAttention, SwiGLU, TrainableRMSNorm
from spec_lab.train.packed_rows import RowPlaces
from spec_lab.train.unroll import TapsRead, UnrolledDrafter


class ModuleShape(Protocol):
    """Says what a module is built from, whatever its target's family."""

    @property
    def hidden_size(self) -> int:
        """The target's."""

    @property
    def rms_norm_eps(self) -> float:
        """The target's."""

    def make_attention(self) -> SelfAttention | LatentSelfAttention:
        """Return the module's own attention."""

    def make_mlp(self) -> nn.Module:
        """Make what stands behind it."""

    def rope(self) -> tuple[RopeConfig, int]:
        """Return the rotary embedding, and the width of what it turns."""


Shape = TypeVar("Shape", bound=ModuleShape)


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """A module whose layer is planned as a target's is (`spec_lab.checkpoints.plan`)."""

    plan: LayerPlan
    hidden_size: int
    rms_norm_eps: float

    def make_attention(self) -> SelfAttention | LatentSelfAttention:
        return attention_of(self.plan, self.hidden_size, self.rms_norm_eps)

    def make_mlp(self) -> nn.Module:
        return mlp_of(self.plan, self.hidden_size)

    def rope(self) -> tuple[RopeConfig, int]:
        return self.plan.rope, self.plan.head_dim


@dataclass(frozen=True, slots=True)
class MtpShape:
    """Sizes of a module with a Qwen3 layer; `hidden_size`, `rope_theta` and `rms_norm_eps` are the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float

    def make_attention(self) -> SelfAttention:
        sizes = (self.hidden_size, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        return SelfAttention(AttentionShape(*sizes, self.rms_norm_eps))

    def make_mlp(self) -> nn.Module:
        return SwiGLU(self.hidden_size, self.intermediate_size)

    def rope(self) -> tuple[RopeConfig, int]:
        return RopeConfig(self.rope_theta, "none"), self.head_dim


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
        self.mlp = shape.make_mlp()
        self.shared_head = SharedHead(shape)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The embedding stands before the hidden state."""
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        return joined, self.input_layernorm(joined)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return what the head reads is recycled: the state after the norm."""
        hidden = residual + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return self.shared_head.norm(hidden)


class MtpDrafter(UnrolledDrafter, Generic[Shape]):
    """Modules and the target's frozen head; a single module takes every step, several one step each."""

    head_weight: Tensor

    def __init__(self, shape: Shape, num_modules: int, head_weight: Tensor) -> None:
        """`head_weight` `[vocab, hidden]`: the target's."""
        super().__init__()
        self.shape = shape
        self.modules_in_order = nn.ModuleList(TrainableMtpModule(shape) for _ in range(num_modules))
        self.register_buffer("head_weight", head_weight.detach(), persistent=False)
        self.rotary = RotaryFrequencies(*shape.rope())

    def features(self, outputs: TapsRead) -> tuple[Tensor, ...]:
        """Return the final hidden state after the norm, `[batch, rows, hidden]`."""
        return (outputs.final_hidden[:, :-1],)

    def draft_token_ids(self) -> Tensor:
        """Return the whole vocabulary."""
        return torch.arange(len(self.head_weight), device=self.head_weight.device)

    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[..., vocab]` from the module's output, which is normed already."""
        return F.linear(state.to(self.head_weight.dtype), self.head_weight)

    def unroll(
        self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, rows: RowPlaces | None = None
    ) -> list[Tensor]:
        """Unroll the modules as `unroll_chain` says."""
        (final_hidden,) = features
        rows = rows or RowPlaces.of_one_document(embeddings)
        rotation = self.rotary(rows.positions)
        return unroll_chain(self._layers(num_steps), embeddings, final_hidden.float(), rotation, rows.segments)

    def chain(self) -> list[TrainableMtpModule]:
        """Return the modules in their order."""
        modules: Iterable[Any] = self.modules_in_order
        return list(modules)

    def _layers(self, num_steps: int) -> Sequence[TrainableMtpModule]:
        modules = self.chain()
        if len(modules) == 1:
            return modules * num_steps
        if num_steps > len(modules):
            raise UserError(
                f"num_draft_tokens={num_steps} is more than the {len(modules)} modules of this drafter; "
                f"lower it to {len(modules)}"
            )
        return modules[:num_steps]
