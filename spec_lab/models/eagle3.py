"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused target features.

Row p pairs the embedding of token t[p+1] with the feature of position p. The first step's features are the
target's tapped layer inputs through `fc`; later steps feed the layer's own output (before the final norm) back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from spec_lab.core.protocols import AttentionBackend, RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.engine.kv_cache import LayerCache
from spec_lab.models.decoder import build_attention, build_mlp
from spec_lab.models.eagle3_checkpoint import Eagle3Config
from spec_lab.models.layers import RMSNorm, RotaryTable
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.rope import rope_tables


class Eagle3Head:
    """Weights and forward of the head; no state between calls."""

    def __init__(
        self,
        config: Eagle3Config,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        target_head: torch.Tensor,
        backend: AttentionBackend,
        max_positions: int,
    ) -> None:
        """`embedding` and `target_head` [vocab, hidden_size] are the target's, used where the checkpoint has none."""
        layer, eps = config.layer, config.layer.rms_norm_eps
        self.config = config
        self._embedding = tensors.get("embed_tokens.weight", embedding)
        self._fc = make_linear(tensors["fc.weight"])
        self._embedding_norm = RMSNorm(tensors["midlayer.input_layernorm.weight"], eps)
        self._hidden_norm = RMSNorm(tensors["midlayer.hidden_norm.weight"], eps)
        self._attention = build_attention(layer, tensors, "midlayer.self_attn.", None, backend)
        self._mlp = build_mlp(tensors, "midlayer.mlp.", layer.mlp_bias)
        self._mlp_norm = RMSNorm(tensors["midlayer.post_attention_layernorm.weight"], eps)
        self._norm = RMSNorm(tensors["norm.weight"], eps)
        self._head: Linear = make_linear(tensors.get("lm_head.weight", target_head))
        self._draft_to_target = draft_to_target_ids(tensors.get("d2t"))
        cos, sin = rope_tables(layer, max_positions, embedding.dtype, embedding.device)
        self._rotary = RotaryTable(cos, sin)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Tapped features [rows, 3 * target_hidden_size] to [rows, hidden_size]."""
        return self._fc(features)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor | None:
        """[rows] tokens and [rows, hidden_size] features to the live rows' output, None when no row goes on."""
        normed = self._hidden_norm(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        rows = torch.cat((self._embedding_norm(F.embedding(token_ids, self._embedding)), normed), dim=-1)
        attended = self._attention(rows, self._rotary.rows(attention.positions), cache, attention, selection)
        if attended is None:
            return None
        stream = selection.residual(residual) + attended
        return selection.live(stream + self._mlp(self._mlp_norm(stream)))

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] to [rows, draft_vocab_size]."""
        return self._head(self._norm(hidden))

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows] most likely tokens, in target ids."""
        draft_ids = self.draft_logits(hidden).argmax(dim=-1)
        return draft_ids if self._draft_to_target is None else self._draft_to_target[draft_ids]

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in target ids, -inf outside the draft vocabulary."""
        draft_logits = self.draft_logits(hidden)
        if self._draft_to_target is None:
            return draft_logits
        logits = draft_logits.new_full((hidden.shape[0], self.config.target_vocab_size), float("-inf"))
        return logits.index_copy_(1, self._draft_to_target, draft_logits)


def draft_to_target_ids(d2t: torch.Tensor | None) -> torch.Tensor | None:
    """The checkpoint's offsets [draft_vocab] as target ids: draft id i is target id i + d2t[i]."""
    return None if d2t is None else torch.arange(d2t.shape[0], device=d2t.device) + d2t
