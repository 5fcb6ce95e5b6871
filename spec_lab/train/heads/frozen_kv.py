"""`drafter=frozen_kv`: queries over keys and values that the target has written, stored as a Gemma 4 assistant.

The architecture is that of the Gemma 4 assistant (Google, 2026; SGLang #24436, vLLM #41745, transformers
`gemma4_assistant`). It has no keys or values of its own, so there is nothing to write, roll back or prefill. Its input
in each step is the last token's embedding and a recurrent vector of the target's width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import Tap
from spec_lab.core.errors import UserError
from spec_lab.export.folders import load_drafter, save_drafter
from spec_lab.train.data import Texts
from spec_lab.train.layers import GatedGELU, Rotation, TrainableRMSNorm, leading_directions, split_heads
from spec_lab.train.packed import visible_rows
from spec_lab.train.target import FrozenTarget, TargetOutputs
from spec_lab.train.unrolled import Places, Unrolled, UnrolledModule

FIRST_BRANCH_SCALE = 0.3


@dataclass(frozen=True, slots=True)
class KVSource:
    """The target layer whose keys and values a layer of the head reads. `turning_pairs`: the rotated fraction of a
    head's pairs."""

    layer: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    turning_pairs: float = 1.0

    @classmethod
    def of(cls, layer: int, plan: LayerPlan) -> KVSource:
        turning = plan.rope.partial_rotary_factor if plan.rope.scaling == "proportional" else 1.0
        return cls(layer, plan.num_kv_heads, plan.head_dim, plan.rope.theta, turning_pairs=turning)


@dataclass(frozen=True, slots=True)
class FrozenKvShape:
    """Sizes of a head; `sources` has an entry for each layer, and `embedding_scale` is the factor for the target's
    unscaled embeddings."""

    backbone_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    sources: tuple[KVSource, ...]
    rms_norm_eps: float
    embedding_scale: float


@dataclass(slots=True)
class SeenKV:
    """The keys and values `[batch, heads, rows, head_dim]` that a layer's queries read, the rotation, and the mask."""

    key: Tensor
    value: Tensor
    rotation: Rotation
    mask: Tensor


class FrozenKvAttention(nn.Module):
    """Attention with its own queries and output product; keys and values are given."""

    def __init__(self, shape: FrozenKvShape, source: KVSource) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * source.head_dim, bias=False)
        self.q_norm = TrainableRMSNorm(source.head_dim, shape.rms_norm_eps)
        self.o_proj = nn.Linear(shape.num_heads * source.head_dim, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, seen: SeenKV) -> Tensor:
        """Attend; row p of `hidden` `[batch, rows, hidden]` sees the keys that the mask allows. Scores are not scaled:
        the query norm does it."""
        query = seen.rotation.apply(self.q_norm(split_heads(self.q_proj(hidden), seen.key.shape[-1])))
        query = query.to(seen.key.dtype)
        attended = F.scaled_dot_product_attention(query, seen.key, seen.value, attn_mask=seen.mask, scale=1.0)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FrozenKvLayer(nn.Module):
    """A Gemma 4 layer: each half has a norm before and after it, and the sum is scaled.

    The scale is part of the format. It stays 1, since training it would be redundant with the norms.
    """

    layer_scalar: Tensor

    def __init__(self, shape: FrozenKvShape, source: KVSource) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = FrozenKvAttention(shape, source)
        self.mlp = GatedGELU(size, shape.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = TrainableRMSNorm(size, eps), TrainableRMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            TrainableRMSNorm(size, eps),
            TrainableRMSNorm(size, eps),
        )
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, stream: Tensor, seen: SeenKV) -> Tensor:
        attended = self.self_attn(self.input_layernorm(stream), seen)
        stream = stream + self.post_attention_layernorm(attended)
        stream = stream + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(stream)))
        return stream * self.layer_scalar


class FrozenKvModel(nn.Module):
    """The part that the checkpoint has under `model.`. Its embedding is the LM head only: the target embeds tokens."""

    def __init__(self, shape: FrozenKvShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(FrozenKvLayer(shape, source) for source in shape.sources)
        self.norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)


class FrozenKvModule(UnrolledModule):
    """The head; `state_dict()` is the checkpoint."""

    def __init__(self, shape: FrozenKvShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = FrozenKvModel(shape)
        self.pre_projection = nn.Linear(2 * shape.backbone_hidden_size, shape.hidden_size, bias=False)
        self.post_projection = nn.Linear(shape.hidden_size, shape.backbone_hidden_size, bias=False)

    def features(self, outputs: TargetOutputs) -> tuple[Tensor, ...]:
        """Return the target's normed final hidden state, `[batch, rows, backbone_hidden]`, then keys and values for
        each layer, `[batch, num_kv_heads, rows, head_dim]`."""
        sources = [outputs.keys_values[source.layer] for source in self.shape.sources]
        return outputs.final_hidden, *(part for key_value in sources for part in key_value)

    def draft_token_ids(self) -> Tensor:
        return torch.arange(self.shape.vocab_size, device=self.post_projection.weight.device)

    def draft_logits(self, state: Tensor) -> Tensor:
        return F.linear(state, self.model.embed_tokens.weight)

    def unroll(self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, places: Places) -> list[Tensor]:
        """Return a normed state `[batch, rows, hidden]` for each step.

        Let anchor a be the last position in the target's cache. Step s takes the embedding of token a+1+s. Its
        recurrent vector is the target's hidden state at a in step 0, and the head's own output later. Every step is at
        position a and sees no keys after it. So row a unrolls anchor a, and only the result is moved to row a+s.
        """
        recurrent, *keys_values = features
        num_rows, embeddings = embeddings.shape[1], embeddings * self.shape.embedding_scale
        seen_by_layer = self._seen(keys_values, places)
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

    def _seen(self, keys_values: list[Tensor], places: Places) -> list[SeenKV]:
        """Return keys and values of each layer for every query head, in one dtype."""
        dtype, mask = keys_values[-1].dtype, visible_rows(places.segments)
        seen = []
        for source, key, value in zip(self.shape.sources, keys_values[::2], keys_values[1::2], strict=True):
            group = self.shape.num_heads // source.num_kv_heads
            key, value = (part.to(dtype).repeat_interleave(group, 1) for part in (key, value))
            rotation = Rotation.at(places.positions[:, None], source.head_dim, source.rope_theta, source.turning_pairs)
            seen.append(SeenKV(key, value, rotation, mask))
        return seen


@dataclass
class FrozenKv(Unrolled):
    """The knobs of an assistant.

    Attributes:
        num_heads: query heads; null is the least multiple of the target's KV heads from 4 on.
        kv_source_layers: layers of the target whose KV is read, one for each layer of the head; [] chooses up to three.
    """

    name: str = "frozen_kv"
    hidden_size: int = 224
    intermediate_size: int = 256
    num_heads: int | None = None
    kv_source_layers: list[int] = field(default_factory=list)

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return none: it reads keys, values and the last hidden state."""
        return ()

    def sources(self, target: FrozenTarget) -> tuple[KVSource, ...]:
        """Return the layers that it reads: those that are named, or three from the middle of the readable ones on.

        A readable layer has full attention, owns its keys, and has a RoPE that the assistant's config can express. Its
        sizes and its RoPE equal those of the last such layer.

        Raises:
            UserError: a named layer is not readable, or none is.
        """
        found = [
            KVSource.of(index, plan)
            for index, plan in enumerate(target.config.layers)
            if plan.window is None and plan.kv_owner is None
            if plan.rope.scaling == "proportional"
            or (plan.rope.scaling, plan.rope.partial_rotary_factor) == ("none", 1)
        ]
        readable = {source.layer: source for source in found if replace(found[-1], layer=source.layer) == source}
        ids = sorted(readable)
        chosen = sorted({ids[len(ids) // 2], ids[len(ids) * 3 // 4], ids[-1]}) if ids else []
        named = self.kv_source_layers or chosen
        if not named or not {*named} <= {*ids}:
            raise UserError(
                f"drafter.kv_source_layers={named}: the layers whose keys can be read are {ids}; name these"
            )
        return tuple(readable[layer] for layer in named)

    def build(self, target: FrozenTarget, texts: Texts, seed: int) -> FrozenKvModule:
        """Make a head whose weights begin at the scales of its inputs and outputs.

        Its embedding and `post_projection` use the directions in which the target's embedding is largest.
        `pre_projection` divides the token's embedding and the hidden state by their root mean squares, so that both
        count equally. Query norms are divided by the root of `head_dim`, since the assistant does not divide its
        scores. Branches start small relative to the stream, as in LayerScale (Touvron et al., 2021).
        """
        torch.manual_seed(seed)
        its, sources = target.config, self.sources(target)
        kv_heads = sources[0].num_kv_heads
        scale = target.config.embedding_scale
        module = FrozenKvModule(
            FrozenKvShape(
                backbone_hidden_size=its.hidden_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                num_heads=self.num_heads or kv_heads * -(-4 // kv_heads),
                vocab_size=its.vocab_size,
                sources=sources,
                rms_norm_eps=its.rms_norm_eps,
                embedding_scale=scale,
            )
        ).requires_grad_(False)
        embedding = target.embed(torch.arange(its.vocab_size, device=target.device)).float().cpu()
        directions = leading_directions(embedding, self.hidden_size)
        module.model.embed_tokens.weight.copy_(embedding @ directions)
        hidden_scale = target.final_norm_weight.float().cpu().square().mean().sqrt()
        module.post_projection.weight.copy_(directions * hidden_scale)
        nn.init.normal_(module.pre_projection.weight, std=module.pre_projection.in_features**-0.5)
        for_embedding, for_hidden = module.pre_projection.weight.chunk(2, dim=1)
        for_embedding /= embedding.square().mean().sqrt() * scale
        for_hidden /= hidden_scale
        layers: Any = module.model.layers
        for layer, source in zip(layers, sources, strict=True):
            layer.self_attn.q_norm.weight.fill_(source.head_dim**-0.5)
            layer.post_attention_layernorm.weight.fill_(FIRST_BRANCH_SCALE)
            layer.post_feedforward_layernorm.weight.fill_(FIRST_BRANCH_SCALE)
        return module.requires_grad_(True)

    def save(self, module: FrozenKvModule, target: FrozenTarget, folder: Path) -> None:
        config = assistant_config(module.shape, target.config.max_position_embeddings)
        save_drafter(module.state_dict(), config, folder)

    def load(self, folder: Path, target: FrozenTarget) -> FrozenKvModule:
        tensors, config = load_drafter(folder)
        text = config["text_config"]
        layers = target.config.layers
        shape = FrozenKvShape(
            backbone_hidden_size=config["backbone_hidden_size"],
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_heads=text["num_attention_heads"],
            vocab_size=text["vocab_size"],
            sources=tuple(KVSource.of(layer, layers[layer]) for layer in config["kv_source_layers"]),
            rms_norm_eps=text["rms_norm_eps"],
            embedding_scale=target.config.embedding_scale,
        )
        module = FrozenKvModule(shape)
        module.load_state_dict(tensors)
        return module.to(target.device)

    def describe(self) -> str:
        return (
            "A frozen-KV head in the form of the Gemma 4 assistant: queries alone, over keys and values of the target. "
            "Every step stands at the last committed position, and takes the embedding of the last token beside the "
            "target's hidden state, or later `post_projection` of its own output."
        )


def assistant_config(shape: FrozenKvShape, max_position_embeddings: int) -> dict[str, Any]:
    """Return config.json, with our `kv_source_layers`: transformers knows one source for all layers.

    Keys that are left out here have the right defaults in transformers.
    """
    num_layers, source = len(shape.sources), shape.sources[0]
    partial = {} if source.turning_pairs == 1.0 else {"partial_rotary_factor": source.turning_pairs}
    rope = {"rope_type": "proportional" if partial else "default", "rope_theta": source.rope_theta, **partial}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": shape.backbone_hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "kv_source_layers": [each.layer for each in shape.sources],
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_kv_shared_layers": num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": source.num_kv_heads,
            "head_dim": source.head_dim,
            "global_head_dim": source.head_dim,
            "attention_k_eq_v": False,
            "layer_types": ["full_attention"] * num_layers,
            "rope_parameters": {"full_attention": rope},
            "rms_norm_eps": shape.rms_norm_eps,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": shape.vocab_size,
            "tie_word_embeddings": True,
            "max_position_embeddings": max_position_embeddings,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "dtype": "bfloat16",
        },
    }
