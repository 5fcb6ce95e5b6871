"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused target features.

Row p takes the embedding of token t[p+1] and the feature of position p. In the first step, features are the target's
tapped layer inputs through `fc`. In later steps, they are the layer's own output before the final norm. Some EAGLE-3.1
heads take it after the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from spec_lab.checkpoints.eagle3_checkpoint import NUM_TAPS, Eagle3Config
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.models.draft_parts import DraftInput, DraftLayers, GreedyHead, HeadLayer, LikeliestToken
from spec_lab.models.launching import launching_of
from spec_lab.models.layer_builder import build_layer
from spec_lab.models.layer_stack import Layer
from spec_lab.models.linear import make_linear
from spec_lab.models.norms import RMSNorm
from spec_lab.models.rope import RotaryTable, rotary_table
from spec_lab.models.scored_tokens import ScoredTokens


class Eagle3Head(GreedyHead):
    """Weights and forward of the head; no state between calls."""

    def __init__(
        self,
        config: Eagle3Config,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        target_head: torch.Tensor,
        backend: AttentionBackend,
        max_positions: int,
        window: int | None = None,
        kernels: KernelSet = TORCH_FORMS,
        rotary: RotaryTable | None = None,
    ) -> None:
        """`embedding` and `target_head` [vocab, hidden_size] are the target's, used if the checkpoint has none.

        Args:
            window: the number of newest keys that a row sees, including its own; None for all keys.
            kernels: replace the parts that they have.
            rotary: the rotary table; None makes one.
        """
        plan, eps = replace(config.layer.only_layer, window=window), config.layer.rms_norm_eps
        self.config = config
        self.tap_norm = tap_norm(config, tensors)
        layer = build_layer(plan, eps, tensors, "midlayer.", backend, kernels=kernels)
        norm, head = RMSNorm(tensors["norm.weight"], eps), make_linear(tensors.get("lm_head.weight", target_head))
        self._norm, self._head = kernels.get(Op.NORM, norm), kernels.get(Op.LINEAR, head)
        self._draft_to_target = draft_to_target_ids(tensors.get("d2t"))
        self.rotary = rotary or rotary_table(plan.rope, plan.head_dim, max_positions, embedding.dtype, embedding.device)
        inputs = DraftInput(
            tensors.get("embed_tokens.weight", embedding),
            RMSNorm(tensors["midlayer.input_layernorm.weight"], eps),
            RMSNorm(tensors["midlayer.hidden_norm.weight"], eps),
        )
        likeliest = LikeliestToken(None if config.norm_output else norm, head, self._draft_to_target)
        self._launching = launching_of(kernels, (plan,))
        self.fc = kernels.get(Op.LINEAR, make_linear(tensors["fc.weight"]))
        self.layer: Layer = kernels.get(Op.LAYER, replace(layer, norm=None))  # its input is normed already
        self.likeliest = kernels.get(Op.LIKELIEST, likeliest)
        inputs = kernels.get(Op.DRAFT_INPUT, inputs)
        run = HeadLayer(inputs, self.layer, self.rotary, config.norm_before_residual)
        self.run: DraftLayers = kernels.get(Op.HEAD_LAYER, run)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse tapped features [rows, 3 * target_hidden_size] into [rows, hidden_size]."""
        return self.fc(features if self.tap_norm is None else self.tap_norm(features))

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, at: Pass) -> torch.Tensor:
        """Run tokens [rows] and features [rows, hidden_size]; return the live rows' output [live rows, hidden_size]."""
        with self._launching(token_ids.shape[0]):
            out = self.run(token_ids, hidden, at)
        return self._norm(out) if self.config.norm_output and not at.kept.is_empty else out

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the output of `forward` [rows, hidden_size] into logits [rows, draft_vocab_size]."""
        return self._head(hidden if self.config.norm_output else self._norm(hidden))

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] in target ids, -inf outside the draft vocabulary."""
        draft_logits = self.draft_logits(hidden)
        if self._draft_to_target is None:
            return draft_logits
        logits = draft_logits.new_full((hidden.shape[0], self.config.target_vocab_size), float("-inf"))
        return logits.index_copy_(1, self._draft_to_target, draft_logits)

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return the logits of the draft vocabulary, and its target ids if they differ from the head's own."""
        return ScoredTokens(self.draft_logits(hidden), self._draft_to_target)


@dataclass(slots=True)
class TapNorm:
    """Applies a separate RMSNorm to each tap; the weights are [num_taps, target_hidden_size]."""

    norm: RMSNorm

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(features.view(-1, *self.norm.weight.shape)).flatten(1)


def tap_norm(config: Eagle3Config, tensors: Mapping[str, torch.Tensor]) -> RMSNorm | TapNorm | None:
    """Build the norm of the tapped features before `fc`, which some EAGLE-3.1 heads have; None if there is none."""
    eps = config.layer.rms_norm_eps
    if config.norm_before_fc:
        return RMSNorm(tensors["input_norm.weight"], eps)
    if config.fc_norm:
        return TapNorm(RMSNorm(torch.stack([tensors[f"fc_norm.{tap}.weight"] for tap in range(NUM_TAPS)]), eps))
    return None


def draft_to_target_ids(d2t: torch.Tensor | None) -> torch.Tensor | None:
    """Turn the checkpoint's offsets [draft_vocab] into target ids: draft id i is target id i + d2t[i]."""
    return None if d2t is None else torch.arange(d2t.shape[0], device=d2t.device) + d2t
