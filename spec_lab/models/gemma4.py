"""Gemma 4 targets: dense (31B), with KV shared by the last layers and an embedding for each layer (E2B, E4B), and with
experts (26B-A4B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.protocols import AttentionBackend, RowSelection
from spec_lab.core.types import AttentionMetadata, FeatureSpec, TargetOutput
from spec_lab.models.config import ModelConfig
from spec_lab.models.decoder import Decoder, read_features
from spec_lab.models.gemma4_layers import build_gemma4_layer
from spec_lab.models.layers import RotaryRows
from spec_lab.models.linear import make_linear
from spec_lab.models.norms import Float32Norm
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.pruning.selection import AllRows


class Gemma4Target(Decoder):
    """Keeps the protocol `Target`.

    Attributes:
        last_writer: the last layer that writes KV. Layers behind it read what earlier ones wrote, so that rows whose
            output nobody reads need not enter them.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        backend: AttentionBackend,
        max_positions: int | None = None,
        partition: Partition = WHOLE,
    ) -> None:
        super().__init__(config, tensors, max_positions, partition)
        sizes = config.gemma4
        assert sizes is not None
        self.last_writer = max(index for index, plan in enumerate(config.layers) if plan.kv_owner is None)
        self._softcap = sizes.logit_softcap
        # Rounded to the weights' dtype first, as the checkpoint was trained.
        self._embedding_scale = rounded(sizes.embedding_scale, self.embedding.dtype)
        self._norm = Float32Norm(tensors["model.norm.weight"], config.rms_norm_eps)
        self._embed_per_layer = (
            PerLayerEmbedding(config, tensors, sizes.per_layer_width) if sizes.per_layer_width else None
        )
        self.layers = [
            build_gemma4_layer(config, plan, tensors, f"model.layers.{index}.", backend, partition)
            for index, plan in enumerate(self.layer_plans)
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        cache: PagedKVCache,
        attention: AttentionMetadata,
        selection: RowSelection,
        features: FeatureSpec,
    ) -> TargetOutput:
        stream = F.embedding(token_ids, self.embedding) * self._embedding_scale
        of_layers = None if self._embed_per_layer is None else self._embed_per_layer(token_ids, stream)
        rows = self._rows(attention, of_layers)
        behind = selection.behind(attention)
        cut = self._cut(behind, features)
        taps: list[torch.Tensor] = []
        all_rows = AllRows()
        for index, layer in enumerate(self.layers):
            if index in features.layer_inputs:
                taps.append(stream)
            kept = selection if index == cut else all_rows
            rotary = rows.rotary[self._table_of_layer[index]]
            stream = layer(stream, rows.embedded(index), rotary, cache.layers[index], rows.attention, kept)
            if index == cut:
                if selection.is_empty:
                    break
                if behind is not None and behind is not attention:
                    rows = self._rows(behind, None if of_layers is None else selection.residual(of_layers))
        hidden, num_rows = self._norm(stream), token_ids.shape[0]
        read = read_features(features, taps, stream, hidden, num_rows)
        return TargetOutput(hidden, read, self._num_shared_rows(cut, num_rows, hidden.shape[0]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Cap the logits in float32: near the cap, rounding would make ties."""
        logits = self._head(hidden)
        if self._softcap is None:
            return logits
        return torch.tanh(logits.float() / self._softcap) * self._softcap

    def _rows(self, attention: AttentionMetadata, of_layers: torch.Tensor | None) -> LayerRows:
        return LayerRows(attention, [table.rows(attention.positions) for table in self.rotary_tables], of_layers)

    def _cut(self, behind: AttentionMetadata | None, features: FeatureSpec) -> int:
        """Choose the layer in which the rows that nobody reads are dropped: the last one that writes KV, or the very
        last where a drafter reads all rows of a layer behind it."""
        last = len(self.layers) - 1
        if behind is None or any(tap > self.last_writer for tap in features.layer_inputs):
            return last
        return self.last_writer

    def _num_shared_rows(self, cut: int, num_rows: int, num_kept: int) -> int:
        if self.last_writer == len(self.layers) - 1:
            return 0
        return num_kept if cut == self.last_writer else num_rows


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Holds what the layers ask of the rows that run through them.

    Attributes:
        rotary: of each of the target's tables.
        of_layers: [rows, num_layers, per_layer_width] the embeddings of the layers; None where they have none.
    """

    attention: AttentionMetadata
    rotary: list[RotaryRows]
    of_layers: torch.Tensor | None

    def embedded(self, index: int) -> torch.Tensor | None:
        """Return the embedding of one layer."""
        return None if self.of_layers is None else self.of_layers[:, index]


class PerLayerEmbedding:
    """Gives every layer an embedding of the tokens, one part from the token alone and one from the shared embedding."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], width: int) -> None:
        self._table = tensors["model.embed_tokens_per_layer.weight"]
        self._table_scale = rounded(width**0.5, self._table.dtype)
        self._projection = make_linear(tensors["model.per_layer_model_projection.weight"])
        self._projection_scale = config.hidden_size**-0.5
        self._norm = Float32Norm(tensors["model.per_layer_projection_norm.weight"], config.rms_norm_eps)
        self._width = width

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Turn [rows] tokens and their scaled embeddings [rows, hidden_size] into [rows, num_layers, width]."""
        of_token = F.embedding(token_ids, self._table) * self._table_scale
        of_context = self._projection(embedded) * self._projection_scale
        normed = self._norm(of_context.unflatten(-1, (-1, self._width)))
        return (normed + of_token.unflatten(-1, (-1, self._width))) * 2**-0.5


def rounded(scale: float, dtype: torch.dtype) -> float:
    """Round a factor as the weights that it is multiplied with are."""
    return float(torch.tensor(scale, dtype=dtype))
