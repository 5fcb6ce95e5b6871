"""Targets of the Llama, Qwen2 and Qwen3 families: lean inference code over Hugging Face weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import LayerCache, PagedKVCache
from spec_lab.core.protocols import AttentionBackend, RowSelection
from spec_lab.core.types import AttentionMetadata, FeatureSpec, NormSide, TargetOutput
from spec_lab.models.config import ModelConfig
from spec_lab.models.layers import (
    Attention,
    FusedRopeAndWrite,
    GatedMLP,
    RMSNorm,
    RopeAndWrite,
    RopeThenWrite,
    RotaryRows,
    RotaryTable,
    fused_linear,
    per_head_norm,
)
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.rope import rope_tables
from spec_lab.pruning.selection import AllRows


def build_attention(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    window: int | None,
    backend: AttentionBackend,
    partition: Partition = WHOLE,
) -> Attention:
    """Build attention from Hugging Face names below `prefix` (ending in `self_attn.`); as in `build_layer`, `config`
    and `tensors` are those of a share."""
    projections = _attention_inputs(config, tensors, prefix, "weight")
    biases = _attention_inputs(config, tensors, prefix, "bias") if config.qkv_bias else None
    return Attention(
        qkv=fused_linear(projections, biases),
        o=partition.output(tensors[f"{prefix}o_proj.weight"], tensors.get(f"{prefix}o_proj.bias")),
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        rope_and_write=_rope_and_write(config, tensors, prefix, backend),
        backend=backend,
        window=window,
        gated=config.attention_gate,
    )


def _rope_and_write(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], prefix: str, backend: AttentionBackend
) -> RopeAndWrite:
    """Take the backend's kernel, unless heads are normed first, rotated in part, or have gates behind them."""
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    if config.qk_norm:
        weights = tensors[f"{prefix}q_norm.weight"], tensors[f"{prefix}k_norm.weight"]
        norm = per_head_norm(*weights, num_heads, num_kv_heads, config.rms_norm_eps)
        return RopeThenWrite(num_heads, num_kv_heads, backend, norm)
    if backend.rope_write is None or config.attention_gate or config.rope.partial_rotary_factor != 1:
        return RopeThenWrite(num_heads, num_kv_heads, backend)
    return FusedRopeAndWrite(num_heads, backend.rope_write)


def _attention_inputs(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], prefix: str, kind: str
) -> list[torch.Tensor]:
    """Return weights or biases of q, k and v, and of the gate, which shares q_proj: a head's query rows, then its
    gate's."""
    q, k, v = (tensors[f"{prefix}{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj"))
    if not config.attention_gate:
        return [q, k, v]
    query, gate = q.unflatten(0, (config.num_heads, 2, config.head_dim)).unbind(1)
    return [query.flatten(0, 1), k, v, gate.flatten(0, 1)]


def build_mlp(tensors: Mapping[str, torch.Tensor], prefix: str, bias: bool, partition: Partition = WHOLE) -> GatedMLP:
    """Build an MLP from Hugging Face names below `prefix` (ending in `mlp.`)."""
    names = ("gate_proj", "up_proj")
    return GatedMLP(
        gate_up=fused_linear(
            [tensors[f"{prefix}{name}.weight"] for name in names],
            [tensors[f"{prefix}{name}.bias"] for name in names] if bias else None,
        ),
        down=partition.output(tensors[f"{prefix}down_proj.weight"], tensors.get(f"{prefix}down_proj.bias")),
    )


class DecoderLayer:
    """Pre-norm residual block. All rows write KV; the selected ones go on."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention: Attention, mlp: GatedMLP, attention_norm: RMSNorm, mlp_norm: RMSNorm) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.mlp_norm = mlp_norm

    def __call__(
        self,
        stream: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn the [rows, hidden_size] residual stream into [kept rows, hidden_size], which may be no row at all."""
        rows = self.attention_norm(stream)
        if selection.is_empty:
            self.attention.write(rows, rotary, cache, metadata)
            return stream[:0]
        stream = selection.residual(stream) + self.attention(rows, rotary, cache, metadata, selection)
        return stream + self.mlp(self.mlp_norm(stream))


def build_layer(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    window: int | None,
    backend: AttentionBackend,
    partition: Partition = WHOLE,
) -> DecoderLayer:
    """Build a layer from Hugging Face names below `prefix` (empty, or ending in a dot).

    `config` and `tensors` are those of the process's share, as `partition` cuts them.
    """
    return DecoderLayer(
        build_attention(config, tensors, f"{prefix}self_attn.", window, backend, partition),
        build_mlp(tensors, f"{prefix}mlp.", config.mlp_bias, partition),
        RMSNorm(tensors[f"{prefix}input_layernorm.weight"], config.rms_norm_eps),
        RMSNorm(tensors[f"{prefix}post_attention_layernorm.weight"], config.rms_norm_eps),
    )


class DecoderTarget:
    """A `Target` that is a decoder with a language-model head.

    Attributes:
        config: of the whole model.
        layer_sizes: the sizes of the layers that lie in this process, and of their KV cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        backend: AttentionBackend,
        max_positions: int | None = None,
        partition: Partition = WHOLE,
    ) -> None:
        """`tensors` has of each what `partition` keeps of it."""
        self.config = config
        self.partition = partition
        self.layer_sizes = partition.layer_sizes(config)
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self.embedding = tensors["model.embed_tokens.weight"]
        head = self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self.head_weight = head
        self._head = partition.head(head)
        self._norm = RMSNorm(tensors["model.norm.weight"], config.rms_norm_eps)
        self.layers = [
            build_layer(self.layer_sizes, tensors, f"model.layers.{index}.", window, backend, partition)
            for index, window in enumerate(config.layer_windows)
        ]
        self.num_positions = max_positions or config.max_position_embeddings
        cos, sin = rope_tables(config, self.num_positions, self.embedding.dtype, self.embedding.device)
        self.rotary = RotaryTable(cos, sin)

    def forward(
        self,
        token_ids: torch.Tensor,
        cache: PagedKVCache,
        attention: AttentionMetadata,
        selection: RowSelection,
        features: FeatureSpec,
    ) -> TargetOutput:
        stream = F.embedding(token_ids, self.embedding)
        rotary = self.rotary.rows(attention.positions)
        taps: list[torch.Tensor] = []
        last_layer = len(self.layers) - 1
        all_rows = AllRows()
        for index, layer in enumerate(self.layers):
            if index in features.layer_inputs:
                taps.append(stream)
            kept = selection if index == last_layer else all_rows
            stream = layer(stream, rotary, cache.layers[index], attention, kept)
        hidden = self._norm(stream)
        if features.final_hidden is not None:
            assert features.last_prompt_row or hidden.shape[0] == token_ids.shape[0], "select every row"
            taps.append(hidden if features.final_hidden is NormSide.POST_NORM else stream)
        return TargetOutput(hidden, torch.cat(taps, dim=-1) if taps else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)
