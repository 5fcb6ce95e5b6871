"""One multi-token prediction module (DeepSeek-V3, arXiv 2412.19437; NextN in SGLang).

Row p pairs the embedding of token t[p+1] with the hidden state of position p, each normed, through a projection into
one decoder layer with a KV cache of its own. Embedding and LM head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spec_lab.checkpoints.mtp_checkpoint import MtpConfig
from spec_lab.checkpoints.mtp_layouts import EMBEDDING_NORM, FINAL_NORM, HIDDEN_NORM, PROJECTION
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend, RowSelection
from spec_lab.core.types import AttentionMetadata, NormSide
from spec_lab.models.draft_parts import DraftInput, LikeliestToken
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layer_builder import build_layer
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.norms import make_norm
from spec_lab.models.products import PLAIN, Products, launching_of
from spec_lab.models.rope import RotaryTable
from spec_lab.models.scored_tokens import ScoredTokens


class MtpModule:
    """Weights and forward of one module; no state between calls."""

    chain = None

    def __init__(
        self,
        config: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        head: Linear,
        rotary: RotaryTable,
        backend: AttentionBackend,
        products: Products = PLAIN,
    ) -> None:
        """`tensors` as `load_mtp` gives them; `embedding` [vocab, hidden_size] and `head` are the target's, and
        `products` gives the parts that few rows go through."""
        plan, eps = config.layer.only_layer, config.layer.rms_norm_eps
        self._launching = launching_of(products, (plan,))
        self.config = config
        self.rotary = rotary
        embedding_norm, hidden_norm, norm = (
            make_norm(tensors[name], eps, plan.float32_norms) for name in (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)
        )
        self._draft_input = products.draft_input(DraftInput(embedding, embedding_norm, hidden_norm))
        self._projection = products.linear(make_linear(tensors[PROJECTION]))
        self.layer = products.layer(build_layer(plan, eps, tensors, "", backend), plan)
        self._norm, self._head = products.norm(norm), products.linear(head)
        self._recycles_normed = config.recycled_hidden is NormSide.POST_NORM
        self._likeliest = products.likeliest(LikeliestToken(None if self._recycles_normed else norm, head))

    @property
    def expert_parts(self) -> tuple[ExpertMLP, ...]:
        return () if self.layer.experts is None else (self.layer.experts,)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states [rows, hidden_size] as they are."""
        return features

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn [rows] tokens t[p+1] and [rows, hidden_size] hidden states h[p] into the live rows' output, as it is
        recycled: [live rows, hidden_size].
        """
        with self._launching(token_ids.shape[0]):
            stream = self._projection(self._draft_input(token_ids, hidden)[0])
            rotary = self.rotary.rows(attention.positions)
            live = selection.live(self.layer(stream, rotary, cache, attention, selection))
            return self._norm(live) if self._recycles_normed else live

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn what `forward` returned [rows, hidden_size] into logits [rows, vocab]."""
        return self._head(hidden if self._recycles_normed else self._norm(hidden))

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the [rows] likeliest tokens."""
        return self._likeliest(hidden)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the [rows] likeliest tokens and their probabilities."""
        return self._likeliest.with_probability(hidden)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab]; the draft vocabulary is the target's."""
        return self.draft_logits(hidden)

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return the same logits, as of a head that knows every token."""
        return ScoredTokens(self.target_logits(hidden))
