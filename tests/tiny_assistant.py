"""Helpers that write tiny random frozen-KV drafters in the Gemma 4 assistant's format, and the slow, obvious model that
they must equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from spec_lab.checkpoints.config import ModelConfig
from tests.lab import Reference
from tests.tiny_checkpoints import random_weight

FULL, SLIDING = "full_attention", "sliding_attention"


def make_tiny_assistant(
    folder: Path,
    target: ModelConfig,
    *,
    seed: int = 0,
    hidden_size: int = 24,
    num_heads: int = 4,
    layer_types: tuple[str, ...] = (FULL, FULL),
    text: dict[str, Any] | None = None,
    **outer: Any,
) -> dict[str, torch.Tensor]:
    """Write a random assistant for a Llama or Qwen target, as ours is shipped; returns its tensors.

    Args:
        text: further keys of text_config.
        outer: further keys of config.json, as `kv_source_layers=[1, 6]`, `use_ordered_embeddings=True`.
    """
    rope = {"rope_type": "default", "rope_theta": target.layers[0].rope.theta}
    config: dict[str, Any] = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": hidden_size,
            "intermediate_size": 40,
            "num_hidden_layers": len(layer_types),
            "num_kv_shared_layers": len(layer_types),
            "num_attention_heads": num_heads,
            "num_key_value_heads": target.layers[0].num_kv_heads,
            "head_dim": target.layers[0].head_dim,
            "global_head_dim": target.layers[0].head_dim,
            "layer_types": list(layer_types),
            "rope_parameters": {FULL: rope, SLIDING: rope},
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": target.vocab_size,
            "sliding_window": 5,
        }
        | (text or {}),
    } | outer
    tensors = _tensors(config, target, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _tensors(config: dict[str, Any], target: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = config["text_config"]
    hidden, inner, query_size = text["hidden_size"], 40, text["num_attention_heads"] * target.layers[0].head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (target.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * target.hidden_size),
        "post_projection.weight": (target.hidden_size, hidden),
    }
    for index in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}{name}_layernorm.weight": (hidden,)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        }
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (query_size, hidden),
            f"{prefix}self_attn.q_norm.weight": (target.layers[0].head_dim,),
            f"{prefix}self_attn.o_proj.weight": (hidden, query_size),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}layer_scalar": (1,),
        }
    ordered = config["use_ordered_embeddings"]
    if ordered:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], hidden)
    tensors = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    for name in tensors:
        # The attention scale is 1: without this a softmax is nearly one-hot, and enlarges every rounding error.
        if name.endswith("q_norm.weight"):
            tensors[name] *= target.layers[0].head_dim ** -0.5
    if ordered:
        tensors["masked_embedding.token_ordering"] = torch.randperm(target.vocab_size, generator=generator)
    return tensors


@dataclass
class SlowAssistant:
    """A model that drafts from the whole text, without a paged cache: target and assistant run anew for every draft.

    `sources` are the target layers read, `windows` the keys seen; None is all.
    """

    tensors: dict[str, torch.Tensor]
    reference: Reference
    sources: list[int]
    windows: list[int | None]
    positions_past_last_key: int = 0
    num_clusters: int = 0

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return the drafts after `text`, whose last token is pending, and the logits of each; -inf is not scored."""
        from transformers import DynamicCache

        cache = DynamicCache()
        output = self.reference.model(
            torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True, output_hidden_states=True
        )
        kv = [(cache.layers[source].keys[0], cache.layers[source].values[0]) for source in self.sources]
        token, recurrent = text[-1], output.hidden_states[-1][0, -1]
        drafts, all_logits = [], []
        for _ in range(num_draft_tokens):
            hidden = self._forward(token, recurrent, kv, len(text) - 2 + self.positions_past_last_key)
            logits = self._logits(hidden)
            token, recurrent = int(logits.argmax()), self.tensors["post_projection.weight"] @ hidden
            drafts.append(token)
            all_logits.append(logits)
        return drafts, all_logits

    def _forward(
        self, token: int, recurrent: torch.Tensor, kv: list[tuple[torch.Tensor, torch.Tensor]], position: int
    ) -> torch.Tensor:
        embedded = self.reference.model.model.embed_tokens.weight[token]
        stream = self.tensors["pre_projection.weight"] @ torch.cat((embedded, recurrent))
        for index, (keys, values) in enumerate(kv):
            get = {
                name.removeprefix(f"model.layers.{index}."): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(f"model.layers.{index}.")
            }
            attended = self._attention(
                get, self._norm(stream, get["input_layernorm.weight"]), keys, values, index, position
            )
            stream = stream + self._norm(attended, get["post_attention_layernorm.weight"])
            row = self._norm(stream, get["pre_feedforward_layernorm.weight"])
            gate = F.gelu(get["mlp.gate_proj.weight"] @ row, approximate="tanh") * (get["mlp.up_proj.weight"] @ row)
            out = get["mlp.down_proj.weight"] @ gate
            stream = (stream + self._norm(out, get["post_feedforward_layernorm.weight"])) * get["layer_scalar"]
        return self._norm(stream, self.tensors["model.norm.weight"])

    def _attention(
        self,
        get: dict[str, torch.Tensor],
        row: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        index: int,
        position: int,
    ) -> torch.Tensor:
        """keys and values [num_kv_heads, length, head_dim] of the target, normed and rotated there."""
        head_dim, window = keys.shape[-1], self.windows[index]
        if window is not None:
            keys, values = keys[:, -window:], values[:, -window:]
        queries = (get["self_attn.q_proj.weight"] @ row).view(-1, head_dim)
        queries = self._rotate(self._norm(queries, get["self_attn.q_norm.weight"]), position)
        keys, values = (x.repeat_interleave(len(queries) // len(x), dim=0) for x in (keys, values))
        weights = torch.einsum("hd,hkd->hk", queries, keys).softmax(-1)
        return get["self_attn.o_proj.weight"] @ torch.einsum("hk,hkd->hd", weights, values).flatten()

    def _rotate(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        half = heads.shape[-1] // 2
        theta = self.reference.model.config.rope_parameters["rope_theta"]
        angles = position * theta ** (-torch.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    def _norm(self, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row / (row.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.tensors["model.embed_tokens.weight"] @ hidden
        if not self.num_clusters:
            return logits
        centroids = self.tensors["masked_embedding.centroids.weight"]
        clusters = self.tensors["masked_embedding.token_ordering"].view(len(centroids), -1)
        scored = clusters[(centroids @ hidden).topk(self.num_clusters).indices].flatten()
        return torch.full_like(logits, float("-inf")).index_copy(0, scored, logits[scored])
