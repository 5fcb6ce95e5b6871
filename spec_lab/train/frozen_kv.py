"""The trainable frozen-KV drafter: it has only queries, over keys and values that the target has written.

The architecture is that of the Gemma 4 assistant (Google, 2026; SGLang #24436, vLLM #41745, transformers
`gemma4_assistant`). It has no keys or values of its own, so there is nothing to write, roll back or prefill. Its input
in each step is the last token's embedding and a recurrent vector of the target's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.train.layers import GatedGELU, Rotation, TrainableRMSNorm, split_heads
from spec_lab.train.packed_attention import visible_rows, window_rows
from spec_lab.train.packed_rows import RowPlaces
from spec_lab.train.unroll import UnrolledDrafter

ATTENTION_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class KVSource:
    """The target layer whose keys and values a drafter layer reads, and their form.

    `window`: number of newest keys that are seen; None for all. `turning_pairs`: the rotated fraction of a head's
    pairs.
    """

    layer: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    turning_pairs: float = 1.0
    window: int | None = None

    @classmethod
    def of_plan(cls, layer: int, plan: LayerPlan) -> KVSource:
        """Describe the keys and values of a target's layer."""
        turning = plan.rope.partial_rotary_factor if plan.rope.scaling == "proportional" else 1.0
        return cls(layer, plan.num_kv_heads, plan.head_dim, plan.rope.theta, turning, plan.window)

    def rotation(self, rows: RowPlaces) -> Rotation:
        return Rotation.at(rows.positions[:, None], self.head_dim, self.rope_theta, self.turning_pairs)

    def mask(self, rows: RowPlaces) -> Tensor | None:
        """Return `[..., rows, rows]`, True if a row sees a key; None for a plain causal mask."""
        if rows.segments is not None:
            return visible_rows(rows.segments, self.window)
        device = rows.positions.device
        return None if self.window is None else window_rows(rows.positions.shape[1], self.window, device)


@dataclass(frozen=True, slots=True)
class FrozenKVShape:
    """Sizes of a drafter. `backbone_hidden_size` and `vocab_size` are the target's; `sources` has an entry for each
    layer.

    `embedding_scale`: the factor for the target's unscaled embeddings.
    """

    backbone_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    sources: tuple[KVSource, ...]
    rms_norm_eps: float
    embedding_scale: float = 1.0

    @property
    def kv_source_layers(self) -> tuple[int, ...]:
        return tuple(source.layer for source in self.sources)


class KeysRead(Protocol):
    """The outputs of a target forward that this drafter reads."""

    @property
    def final_hidden(self) -> Tensor:
        """`[batch, length, hidden]` after the last norm."""

    @property
    def keys_values(self) -> Sequence[tuple[Tensor, Tensor]]:
        """The keys and values of each layer, `[batch, num_kv_heads, length, head_dim]` each."""


@dataclass(slots=True)
class SeenKV:
    """The keys and values `[batch, heads, rows, head_dim]` that a layer's queries read, the rotation, and the mask."""

    key: Tensor
    value: Tensor
    rotation: Rotation
    mask: Tensor | None


class FrozenKVAttention(nn.Module):
    """Attention with its own queries and output product; keys and values are given."""

    def __init__(self, shape: FrozenKVShape, source: KVSource) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * source.head_dim, bias=False)
        self.q_norm = TrainableRMSNorm(source.head_dim, shape.rms_norm_eps)
        self.o_proj = nn.Linear(shape.num_heads * source.head_dim, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, seen: SeenKV) -> Tensor:
        """Attend; row p of `hidden` `[batch, rows, hidden]` sees the keys up to p that the mask allows."""
        query = seen.rotation.apply(self.q_norm(split_heads(self.q_proj(hidden), seen.key.shape[-1])))
        attended = F.scaled_dot_product_attention(
            query.to(seen.key.dtype),
            seen.key,
            seen.value,
            attn_mask=seen.mask,
            is_causal=seen.mask is None,
            scale=ATTENTION_SCALE,
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FrozenKVLayer(nn.Module):
    """A Gemma 4 layer: each half has a norm before and after it, and the sum is scaled.

    The scale is part of the format. It stays 1, since training it would be redundant with the norms.
    """

    layer_scalar: Tensor

    def __init__(self, shape: FrozenKVShape, source: KVSource) -> None:
        super().__init__()
        self.self_attn = FrozenKVAttention(shape, source)
        self.mlp = GatedGELU(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_feedforward_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_feedforward_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, stream: Tensor, seen: SeenKV) -> Tensor:
        attended = self.self_attn(self.input_layernorm(stream), seen)
        stream = stream + self.post_attention_layernorm(attended)
        stream = stream + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(stream)))
        return stream * self.layer_scalar


class FrozenKVModel(nn.Module):
    """The part that the checkpoint has under `model.`.

    Its embedding is used as the head only: tokens are embedded by the target.
    """

    def __init__(self, shape: FrozenKVShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(FrozenKVLayer(shape, source) for source in shape.sources)
        self.norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)


class TrainableFrozenKVDrafter(UnrolledDrafter):
    """The drafter; `state_dict()` is the checkpoint."""

    def __init__(self, shape: FrozenKVShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = FrozenKVModel(shape)
        self.pre_projection = nn.Linear(2 * shape.backbone_hidden_size, shape.hidden_size, bias=False)
        self.post_projection = nn.Linear(shape.hidden_size, shape.backbone_hidden_size, bias=False)

    def features(self, outputs: KeysRead) -> tuple[Tensor, ...]:
        """Return the target's normed final hidden state, then keys and values for each layer of the drafter.

        The former is `[batch, rows, backbone_hidden]`; the others are `[batch, num_kv_heads, rows, head_dim]`.
        """
        sources = [outputs.keys_values[layer] for layer in self.shape.kv_source_layers]
        return outputs.final_hidden[:, :-1], *(part[:, :, :-1] for key_value in sources for part in key_value)

    def draft_token_ids(self) -> Tensor:
        """Every token of the target can be drafted."""
        return torch.arange(self.shape.vocab_size, device=self.post_projection.weight.device)

    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[..., vocab_size]` from a state of `unroll`; the head is the embedding."""
        return F.linear(state, self.model.embed_tokens.weight)

    def unroll(
        self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, rows: RowPlaces | None = None
    ) -> list[Tensor]:
        """Return a normed state `[batch, rows, hidden]` for each step; see `UnrolledDrafter`.

        Let anchor a be the last position in the target's cache. Step s takes the embedding of token a+1+s. Its
        recurrent vector is the target's hidden state at a in step 0, and the drafter's own output later. Every step is
        at position a and sees no keys after it. So row a unrolls anchor a, and only the result is moved to row a+s.
        """
        target_hidden, *keys_values = features
        num_rows, embeddings = embeddings.shape[1], embeddings * self.shape.embedding_scale
        seen_by_layer = self._seen(keys_values, rows or RowPlaces.of_one_document(embeddings))
        recurrent = target_hidden
        states: list[Tensor] = []
        for step in range(num_steps):
            embedded = F.pad(embeddings[:, step:], (0, 0, 0, step))
            stream = self.pre_projection(torch.cat([embedded, recurrent], dim=-1))
            for layer, seen in zip(self.model.layers, seen_by_layer, strict=True):
                stream = layer(stream, seen)
            state = self.model.norm(stream)
            states.append(F.pad(state[:, : num_rows - step], (0, 0, step, 0)))
            recurrent = self.post_projection(state)
        return states

    def _seen(self, keys_values: list[Tensor], rows: RowPlaces) -> list[SeenKV]:
        """Return keys and values of each layer for every query head, in one dtype."""
        dtype = keys_values[-1].dtype
        seen = []
        for source, key, value in zip(self.shape.sources, keys_values[::2], keys_values[1::2], strict=True):
            group = self.shape.num_heads // source.num_kv_heads
            key, value = (part.to(dtype).repeat_interleave(group, 1) for part in (key, value))
            seen.append(SeenKV(key, value, source.rotation(rows), source.mask(rows)))
        return seen
