"""One multi-token prediction module (DeepSeek-V3, arXiv 2412.19437; NextN in SGLang).

Row p norms the embedding of token t[p+1] and the hidden state of position p. A projection of both is the input of one
decoder layer with its own KV cache. Embedding and LM head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spec_lab.checkpoints.mtp_checkpoint import EMBEDDING_NORM, FINAL_NORM, HIDDEN_NORM, PROJECTION, MtpConfig
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.types import NormSide
from spec_lab.models.draft_parts import DraftInput, GreedyHead, LikeliestToken
from spec_lab.models.launching import launching_of
from spec_lab.models.layer_builder import build_layer
from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.norms import make_norm
from spec_lab.models.rope import RotaryTable
from spec_lab.models.scored_tokens import ScoredTokens


class MtpModule(GreedyHead):
    """Weights and forward of one module; no state between calls."""

    def __init__(
        self,
        config: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        head: Linear,
        rotary: RotaryTable,
        backend: AttentionBackend,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        """`tensors`: as `load_mtp` returns them; `embedding` [vocab, hidden_size] and `head`: the target's; `kernels`
        replace the parts that they have."""
        plan, eps = config.layer.only_layer, config.layer.rms_norm_eps
        self._launching = launching_of(kernels, (plan,))
        self.config = config
        self.rotary = rotary
        embedding_norm, hidden_norm, norm = (
            make_norm(tensors[name], eps, plan.float32_norms) for name in (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)
        )
        self._draft_input = kernels.get(Op.DRAFT_INPUT, DraftInput(embedding, embedding_norm, hidden_norm))
        self._projection = kernels.get(Op.LINEAR, make_linear(tensors[PROJECTION]))
        self.layer = kernels.get(Op.LAYER, build_layer(plan, eps, tensors, "", backend, kernels=kernels))
        self._norm, self._head = kernels.get(Op.NORM, norm), kernels.get(Op.LINEAR, head)
        self._recycles_normed = config.recycled_hidden is NormSide.POST_NORM
        self.likeliest = kernels.get(Op.LIKELIEST, LikeliestToken(None if self._recycles_normed else norm, head))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states [rows, hidden_size] as they are."""
        return features

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        """Run tokens t[p+1] [rows] and hidden states h[p] [rows, hidden_size].

        Return the live rows' output in the form in which it is fed back, [live rows, hidden_size].
        """
        with self._launching(token_ids.shape[0]):
            stream = self._projection(self._draft_input(token_ids, hidden)[0])
            live = at.kept.live(self.layer(stream, self.rotary.turning(at)))
            return self._norm(live) if self._recycles_normed else live

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the output of `forward` [rows, hidden_size] into logits [rows, vocab]."""
        return self._head(hidden if self._recycles_normed else self._norm(hidden))

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab]; the draft vocabulary is the target's."""
        return self.draft_logits(hidden)

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return `target_logits` as scores of all tokens."""
        return ScoredTokens(self.target_logits(hidden))
