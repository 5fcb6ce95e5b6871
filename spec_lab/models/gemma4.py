"""Gemma 4 targets.

They are dense (31B), or have experts (26B-A4B). In E2B and E4B the last layers share KV, and each layer has an
additional embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.core.kept import ALL_ROWS
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass, RotaryRows
from spec_lab.core.types import AttentionMetadata, FeatureSpec, TargetOutput
from spec_lab.models.decoder import Decoder, read_features
from spec_lab.models.gemma4_layers import build_gemma4_layer
from spec_lab.models.linear import make_linear
from spec_lab.models.norms import Float32Norm, rounded
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.sandwich import CapLogits, EmbedPerLayer, LogitCap, PerLayerEmbedding


class Gemma4Target(Decoder):
    """A Gemma 4 decoder as a target.

    Attributes:
        last_writer: the last layer that writes KV. Later layers read the KV of earlier ones, so rows whose output is
            not read can skip them.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        backend: AttentionBackend,
        max_positions: int | None = None,
        partition: Partition = WHOLE,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        super().__init__(config, tensors, max_positions, partition, kernels)
        sizes = config.gemma4
        assert sizes is not None
        self.last_writer = max(index for index, plan in enumerate(config.layers) if plan.kv_owner is None)
        self._launching = kernels.get(Op.EARLY_LAUNCHES, nullcontext)
        self._cap: CapLogits | None = None
        if sizes.logit_softcap is not None:
            self._cap = kernels.get(Op.LOGIT_CAP, LogitCap(sizes.logit_softcap))
        # The embedding module of transformers also rounds the scale to the weights' dtype.
        self._embedding_scale = rounded(sizes.embedding_scale, self.embedding.dtype)
        self._norm = kernels.get(Op.NORM, Float32Norm(self.final_norm_weight, config.rms_norm_eps))
        self._embed_per_layer: EmbedPerLayer | None = None
        if sizes.per_layer_width:
            own = build_per_layer_embedding(config, tensors, sizes.per_layer_width)
            self._embed_per_layer = kernels.get(Op.PER_LAYER_EMBEDDING, own)
        self.layers = [
            build_gemma4_layer(config, plan, tensors, f"model.layers.{index}.", backend, partition, kernels)
            for index, plan in enumerate(self.layer_plans)
        ]

    def forward(self, token_ids: torch.Tensor, at: Pass, features: FeatureSpec) -> TargetOutput:
        with self._launching():
            stream = F.embedding(token_ids, self.embedding) * self._embedding_scale
            of_layers = None if self._embed_per_layer is None else self._embed_per_layer(token_ids, stream)
            rows = self._rows(at.metadata, of_layers)
            cut, kept = self._cut(features), at.kept
            taps: list[torch.Tensor] = []
            for index, layer in enumerate(self.layers):
                if index in features.layer_inputs:
                    taps.append(stream)
                rotary = rows.rotary[self._table_of_layer[index]]
                here = kept if index == cut else ALL_ROWS
                stream = layer(stream, rows.embedded(index), Pass(at.cache.layers[index], rows.attention, here, rotary))
                if index == cut:
                    if kept.is_empty:
                        break
                    if kept.drop.is_inside:
                        of_kept = None if of_layers is None else kept.residual(of_layers)
                        rows = self._rows(kept.behind(at.metadata), of_kept)
            hidden, num_rows = self._norm(kept.live(stream)), token_ids.shape[0]
            read = read_features(features, taps, stream, hidden, num_rows)
            num_shared = stream.shape[0] if cut == self.last_writer else num_rows
            return TargetOutput(hidden, read, num_shared if self.last_writer < len(self.layers) - 1 else 0)

    def _all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden)
        return logits if self._cap is None else self._cap(logits)

    def _rows(self, attention: AttentionMetadata, of_layers: torch.Tensor | None) -> Gemma4Rows:
        return Gemma4Rows(attention, [table.rows(attention.positions) for table in self.rotary_tables], of_layers)

    def _cut(self, features: FeatureSpec) -> int:
        """Choose the layer in which unread rows are dropped: the last one that writes KV.

        If a drafter taps a later layer, all rows go on to the last layer, since the tap needs them.
        """
        last = len(self.layers) - 1
        if any(tap > self.last_writer for tap in features.layer_inputs):
            return last
        return self.last_writer


@dataclass(frozen=True, slots=True)
class Gemma4Rows:
    """The data about the current rows that the layers need.

    Attributes:
        rotary: cos and sin from each of the target's rotary tables.
        of_layers: [rows, num_layers, per_layer_width] the embeddings for each layer; None if there are none.
    """

    attention: AttentionMetadata
    rotary: list[RotaryRows]
    of_layers: torch.Tensor | None

    def embedded(self, index: int) -> torch.Tensor | None:
        """Return the embedding of one layer; None if there are none."""
        return None if self.of_layers is None else self.of_layers[:, index]


def build_per_layer_embedding(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], width: int
) -> PerLayerEmbedding:
    """Build the per-layer embeddings, of `width` channels for each layer, from Hugging Face names."""
    table = tensors["model.embed_tokens_per_layer.weight"]
    return PerLayerEmbedding(
        table=table,
        table_scale=rounded(width**0.5, table.dtype),
        projection=make_linear(tensors["model.per_layer_model_projection.weight"]),
        projection_scale=config.hidden_size**-0.5,
        norm=Float32Norm(tensors["model.per_layer_projection_norm.weight"], config.rms_norm_eps),
        width=width,
    )
