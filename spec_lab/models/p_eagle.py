"""The P-EAGLE head (arXiv 2602.01469): an EAGLE-3 head of one or more layers, with mask rows that predict drafts.

A mask row has the mask token's embedding, and a learned vector instead of the target's features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from spec_lab.checkpoints.eagle3_checkpoint import Eagle3Config
from spec_lab.core.kept import ALL_ROWS
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.eagle3 import Eagle3Head, draft_to_target_ids
from spec_lab.models.layer_builder import build_layer
from spec_lab.models.rope import RotaryTable


class PEagleHead:
    """Weights and forward of the head; no state between calls.

    Attributes:
        mask_token_id: the token of mask rows.
        mask_features: [1, hidden_size] the learned vector of mask rows, after `fuse`.
    """

    def __init__(
        self,
        config: Eagle3Config,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        target_head: torch.Tensor,
        backend: AttentionBackend,
        max_positions: int,
        kernels: KernelSet = TORCH_FORMS,
        rotary: RotaryTable | None = None,
    ) -> None:
        """Take arguments as `Eagle3Head` does, which is the first layer."""
        assert config.mask_token_id is not None
        self.config = config
        # No output is fed back, so whether it would be normed does not matter.
        first = replace(config, norm_output=False)
        self._first = Eagle3Head(
            first,
            tensors,
            embedding,
            target_head,
            backend=backend,
            max_positions=max_positions,
            kernels=kernels,
            rotary=rotary,
        )
        eps = config.layer.rms_norm_eps
        self._layers = [
            build_layer(plan, eps, tensors, f"layers.{index}.", backend)
            for index, plan in enumerate(config.more_layers, start=1)
        ]
        self._vocab_size = config.target_vocab_size
        self._token_map = draft_to_target_ids(tensors.get("d2t"))
        self.mask_token_id = config.mask_token_id
        self.mask_features = self._first.fuse(tensors["mask_hidden"].flatten(0, 1))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse tapped features [rows, 3 * target_hidden_size] into [rows, hidden_size]."""
        return self._first.fuse(features)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        """Run tokens [rows] and features [rows, hidden_size]; return the live rows' output [live rows, hidden_size]."""
        last, caches = len(self._layers), at.cache.layers
        kept = [*[ALL_ROWS] * last, at.kept]
        stream = self._first.forward(token_ids, hidden, Pass(caches[0], at.metadata, kept[0]))
        if not last:
            return stream
        rotary = self._first.rotary.rows(at.metadata.positions)
        for layer, cache, here in zip(self._layers, caches[1:], kept[1:], strict=True):
            stream = layer(stream, Pass(cache, at.metadata, here, rotary))
        return stream if at.kept.is_empty else at.kept.live(stream)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the output of `forward` [rows, hidden_size] into logits [rows, draft vocabulary]."""
        return self._first.draft_logits(hidden)

    def scored(self, logits: torch.Tensor) -> SlotScores:
        """Return logits [rows, draft vocabulary] together with their token ids."""
        return SlotScores(logits, self._token_map, self._vocab_size)
