"""`drafter=mtp_eagle`: one multi-token-prediction module (DeepSeek-V3, 2024, section 2.2), used again at every step.

It combines a token's embedding with the hidden state of the position before it, runs one layer with plain attention,
and uses the target's LM head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import Tap
from spec_lab.export.eagle3_json import rope_keys
from spec_lab.export.folders import load_drafter, save_drafter
from spec_lab.train.data import Texts
from spec_lab.train.head import LayerSizes
from spec_lab.train.layers import AttentionShape, RotaryFrequencies, SelfAttention, SwiGLU, TrainableRMSNorm
from spec_lab.train.target import FrozenTarget, TargetOutputs
from spec_lab.train.unrolled import Places, Unrolled, UnrolledModule, unroll_chain


class MtpLayer(nn.Module):
    """A module under the names of its checkpoint; a `ChainLayer`."""

    def __init__(self, plan: LayerPlan, size: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm = TrainableRMSNorm(size, eps), TrainableRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm, self.post_attention_layernorm = TrainableRMSNorm(size, eps), TrainableRMSNorm(size, eps)
        heads = plan.num_heads, plan.num_kv_heads, plan.head_dim
        self.self_attn = SelfAttention(
            AttentionShape(size, size, *heads, eps if plan.qk_norm else None, has_bias=plan.qkv_bias)
        )
        self.mlp = SwiGLU(size, plan.intermediate_size)
        self.shared_head = nn.ModuleDict({"norm": TrainableRMSNorm(size, eps)})

    @property
    def last_norm(self) -> TrainableRMSNorm:
        """The norm before the LM head."""
        norm: Any = self.shared_head["norm"]
        return norm

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projection of the normed embedding and hidden state, and the same normed for attention."""
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        return joined, self.input_layernorm(joined)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the state after the norm, which is fed back and is also the LM head's input."""
        hidden = residual + attended
        return self.last_norm(hidden + self.mlp(self.post_attention_layernorm(hidden)))


class TrainableMtp(UnrolledModule):
    """The module, and the target's frozen LM head `head_weight` [vocab, hidden]."""

    head_weight: Tensor

    def __init__(self, plan: LayerPlan, target: FrozenTarget) -> None:
        super().__init__()
        self.plan = plan
        self.layer = MtpLayer(plan, target.config.hidden_size, target.config.rms_norm_eps)
        self.register_buffer("head_weight", target.head_weight.detach(), persistent=False)
        self.rotary = RotaryFrequencies(plan.rope, plan.head_dim)

    def features(self, outputs: TargetOutputs) -> tuple[Tensor, ...]:
        """Return the final hidden state after the norm, `[batch, rows, hidden]`."""
        return (outputs.final_hidden,)

    def draft_token_ids(self) -> Tensor:
        return torch.arange(len(self.head_weight), device=self.head_weight.device)

    def draft_logits(self, state: Tensor) -> Tensor:
        return F.linear(state.to(self.head_weight.dtype), self.head_weight)

    def unroll(self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, places: Places) -> list[Tensor]:
        (hidden,) = features
        rotation = self.rotary(places.positions)
        return unroll_chain(self.layer, embeddings, hidden.float(), rotation, places.segments, num_steps)


@dataclass
class MtpEagle(LayerSizes, Unrolled):
    """The knobs of an MTP module."""

    name: str = "mtp_eagle"

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return none: it reads only the last hidden state."""
        return ()

    def plan(self, target: FrozenTarget) -> LayerPlan:
        """Return the plan of its layer.

        It has q and k norms if the target's layers have them. Its q, k and v projections have biases if the target's
        have them and the target's `o_proj` has none.
        """
        like = target.plan
        sizes: Any = self.filled(target.config.layers[-1])
        return LayerPlan(
            **sizes,
            rope=target.draft_rope,
            qkv_bias=like.qkv_bias and not like.o_bias,
            qk_norm=like.qk_norm,
        )

    def build(self, target: FrozenTarget, texts: Texts, seed: int) -> TrainableMtp:
        """Make a module. The norm before the LM head begins as the target's."""
        torch.manual_seed(seed)
        module = TrainableMtp(self.plan(target), target)
        module.layer.last_norm.weight.data.copy_(target.final_norm_weight)
        return module

    def save(self, module: TrainableMtp, target: FrozenTarget, folder: Path) -> None:
        """Write the module and a config of its own. As in DeepSeek's files, its layer number follows the target's
        last."""
        plan, config = module.plan, target.config
        name = "Qwen3" if plan.qk_norm else "Qwen2" if plan.qkv_bias else "Llama"
        keys = {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": name.lower(),
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": plan.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": plan.num_heads,
            "num_key_value_heads": plan.num_kv_heads,
            "head_dim": plan.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.rms_norm_eps,
            **rope_keys(plan.rope),
            "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings,
            "num_nextn_predict_layers": 1,
            "torch_dtype": "bfloat16",
        }
        prefix = f"model.layers.{config.num_layers}."
        save_drafter({f"{prefix}{name}": tensor for name, tensor in module.layer.state_dict().items()}, keys, folder)

    def load(self, folder: Path, target: FrozenTarget) -> TrainableMtp:
        tensors, _ = load_drafter(folder)
        prefix = f"model.layers.{target.config.num_layers}."
        module = TrainableMtp(self.plan(target), target)
        module.layer.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
        return module.to(target.device)

    def describe(self) -> str:
        return (
            "An MTP module with one layer, over the target's own embedding and LM head. Row p pairs the embedding of "
            "token p+1 with the final hidden state at p, after the norm; every draft uses the same module."
        )
