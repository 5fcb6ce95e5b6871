"""A Gemma 4 target as trained: sliding and full layers, the last ones over the KV of earlier ones, and an embedding for
each layer (the E2B and E4B kind). The forward is that of `spec_lab.models.gemma4`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.train.attention_kinds import rotation_of
from spec_lab.train.decoder import KeysValues, TrainableDecoder
from spec_lab.train.layers import GatedGELU, Rotation, TrainableRMSNorm, split_heads

ATTENTION_SCALE = 1.0


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are multiplied by a constant as they are read."""

    def __init__(self, vocab_size: int, width: int, scale: float) -> None:
        super().__init__(vocab_size, width)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class GemmaAttention(nn.Module):
    """Attention over keys and values of its own, or over those of `plan.kv_owner`."""

    def __init__(self, plan: LayerPlan, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.plan, self.eps = plan, eps
        self.q_proj = nn.Linear(hidden_size, plan.num_heads * plan.head_dim, bias=False)
        self.q_norm = TrainableRMSNorm(plan.head_dim, eps)
        nn.init.constant_(self.q_norm.weight, plan.head_dim**-0.5)  # the scale of the scores is 1
        if plan.kv_owner is None:
            self.k_proj = nn.Linear(hidden_size, plan.num_kv_heads * plan.head_dim, bias=False)
            self.v_proj = nn.Linear(hidden_size, plan.num_kv_heads * plan.head_dim, bias=False)
            self.k_norm = TrainableRMSNorm(plan.head_dim, eps)
        self.o_proj = nn.Linear(plan.num_heads * plan.head_dim, hidden_size, bias=False)

    def keys_values(self, rows: Tensor, rotation: Rotation) -> KeysValues:
        """Return the keys and values that the layer caches of rows `[batch, rows, hidden]`."""
        key = rotation.apply(self.k_norm(split_heads(self.k_proj(rows), self.plan.head_dim)))
        value = split_heads(self.v_proj(rows), self.plan.head_dim)
        return KeysValues(key, F.rms_norm(value.float(), value.shape[-1:], None, self.eps).to(value.dtype))

    def forward(self, rows: Tensor, rotation: Rotation, seen: KeysValues, mask: Tensor | None) -> Tensor:
        """`mask` `[rows, rows]` is True where a row sees a key; None is plainly causal."""
        assert seen.keys is not None and seen.values is not None
        query = rotation.apply(self.q_norm(split_heads(self.q_proj(rows), self.plan.head_dim)))
        group = self.plan.num_heads // self.plan.num_kv_heads
        key, value = seen.keys.repeat_interleave(group, 1), seen.values.to(query.dtype).repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=ATTENTION_SCALE
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class GemmaLayer(nn.Module):
    """A layer whose thirds are attention, MLP and its own embedding of the tokens, under the names of checkpoints."""

    def __init__(self, config: ModelConfig, plan: LayerPlan) -> None:
        super().__init__()
        assert config.gemma4 is not None
        hidden, eps, width = config.hidden_size, config.rms_norm_eps, config.gemma4.per_layer_width
        self.input_layernorm = TrainableRMSNorm(hidden, eps)
        self.self_attn = GemmaAttention(plan, hidden, eps)
        self.post_attention_layernorm = TrainableRMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = TrainableRMSNorm(hidden, eps)
        self.mlp = GatedGELU(hidden, plan.intermediate_size)
        self.post_feedforward_layernorm = TrainableRMSNorm(hidden, eps)
        self.per_layer_input_gate = nn.Linear(hidden, width, bias=False)
        self.per_layer_projection = nn.Linear(width, hidden, bias=False)
        self.post_per_layer_input_norm = TrainableRMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, stream: Tensor, embedded: Tensor, rotation: Rotation, mask: Tensor | None, shared: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """Return the stream behind the layer, and the keys and values that it read: `shared`, or those it made."""
        rows = self.input_layernorm(stream)
        seen = self.self_attn.keys_values(rows, rotation) if shared is None else shared
        stream = stream + self.post_attention_layernorm(self.self_attn(rows, rotation, seen, mask))
        stream = stream + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(stream)))
        gated = F.gelu(self.per_layer_input_gate(stream), approximate="tanh") * embedded
        stream = stream + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return stream * self.layer_scalar, seen


class GemmaStack(nn.Module):
    """The part that a checkpoint keeps under `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.gemma4
        assert sizes is not None and sizes.per_layer_width, "the recipe is of the kind with an embedding for each layer"
        width, packed = sizes.per_layer_width, config.num_layers * sizes.per_layer_width
        self.width, self.context_scale = width, config.hidden_size**-0.5
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size, sizes.embedding_scale)
        self.embed_tokens_per_layer = ScaledEmbedding(config.vocab_size, packed, width**0.5)
        self.per_layer_model_projection = nn.Linear(config.hidden_size, packed, bias=False)
        self.per_layer_projection_norm = TrainableRMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(GemmaLayer(config, plan) for plan in config.layers)
        self.norm = TrainableRMSNorm(config.hidden_size, config.rms_norm_eps)

    def of_layers(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Return `[batch, rows, layers, width]`: each layer's own embedding, from the token and from what enters the
        stack."""
        token_part = self.embed_tokens_per_layer(tokens).unflatten(-1, (-1, self.width))
        context_part = self.per_layer_model_projection(embedded).unflatten(-1, (-1, self.width)) * self.context_scale
        return (token_part + self.per_layer_projection_norm(context_part)) * 2**-0.5


class TrainableGemma4(TrainableDecoder):
    """A Gemma 4 with tied embeddings and capped logits."""

    def _stack(self) -> Any:
        return GemmaStack(self.config.model)

    def run(self, tokens: Tensor) -> tuple[list[Tensor], list[KeysValues]]:
        stream = self.model.embed_tokens(tokens)
        of_layers = self.model.of_layers(tokens, stream)
        inputs: list[Tensor] = []
        cached: list[KeysValues] = []
        for index, (layer, plan) in enumerate(zip(self.model.layers, self.config.model.layers, strict=True)):
            inputs.append(stream)
            rotation = rotation_of(plan, tokens.shape[1], tokens.device)
            shared = None if plan.kv_owner is None else cached[plan.kv_owner]
            mask = None if plan.window is None else window_mask(tokens.shape[1], plan.window, tokens.device)
            stream, seen = layer(stream, of_layers[:, :, index], rotation, mask, shared)
            cached.append(seen)
        return [*inputs, self.model.norm(stream)], cached

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.config.model.gemma4 is not None
        cap = self.config.model.gemma4.logit_softcap
        logits = F.linear(hidden, self.model.embed_tokens.weight)
        return logits if cap is None else cap * torch.tanh(logits / cap)


def window_mask(num_rows: int, window: int, device: torch.device) -> Tensor:
    """Return `[rows, rows]`, True where a row sees a key: itself and the `window - 1` before it."""
    row = torch.arange(num_rows, device=device)
    distance = row[:, None] - row[None, :]
    return (distance >= 0) & (distance < window)
