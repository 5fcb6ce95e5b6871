"""A frozen target for training heads, run with the engine's own code, for any family with plain attention.

Its layers, weights, taps and head are those of decoding (`spec_lab.models`). Only attention differs: it takes whole
rows of packed texts instead of a paged cache (`spec_lab.train.packed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.taps import Tap
from spec_lab.core.errors import UserError
from spec_lab.core.passes import Pass
from spec_lab.core.rows import rows_at
from spec_lab.core.types import FeatureSpec
from spec_lab.models.decoder import Decoder
from spec_lab.models.target_loader import WeightSource, load_target
from spec_lab.train.packed import PackedAttention, PackedCache, PackedMetadata, PackedRows


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """The outputs of one forward over packed rows that heads read.

    Attributes:
        tapped: [batch, length, taps * hidden] the tapped hidden states, concatenated.
        final_hidden: [batch, length, hidden] after the last norm, the input of the LM head.
        tokens: [batch, length] the tokens that were run.
        keys_values: keys and values of each layer, or of the layer whose KV it shares, [batch, num_kv_heads, length,
            head_dim] each.
    """

    tapped: Tensor
    final_hidden: Tensor
    tokens: Tensor
    keys_values: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """A target in the engine's code, run over packed rows without gradients."""

    decoder: Decoder
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, path: Path, device: torch.device, dtype: torch.dtype, max_positions: int) -> FrozenTarget:
        """Read a checkpoint folder or a GGUF file.

        Raises:
            UserError: a file cannot be read, or a layer keeps a state or has latent attention.
        """
        config = read_model_config(path)
        if config.keeps_states or any(plan.latent is not None for plan in config.layers):
            raise UserError(f"target.path={path}: heads are trained for plain attention alone; take another target")
        backend: Any = PackedAttention()
        positions = min(max_positions, config.max_position_embeddings)
        return cls(load_target(config, WeightSource(path, dtype, device), backend, positions), device, dtype)

    @property
    def in_16_bits(self) -> bool:
        """Whether it computes in bfloat16; the head in training then does too."""
        return self.dtype == torch.bfloat16

    @property
    def config(self) -> ModelConfig:
        """The sizes of the target."""
        return self.decoder.config

    @property
    def plan(self) -> LayerPlan:
        """The plan of the last layer with full attention, or of the last layer if all have a window."""
        return next((plan for plan in reversed(self.config.layers) if plan.window is None), self.config.layers[-1])

    @property
    def draft_rope(self) -> RopeConfig:
        """The rotary embedding of a head for this target.

        Heads have plain layers, which support neither partial rotation nor scalings other than linear and llama3. If
        they do not support the target's, a head takes only its base.
        """
        rope = self.plan.rope
        plain = rope.scaling in ("none", "linear", "llama3") and rope.partial_rotary_factor == 1.0
        return rope if plain else RopeConfig(rope.theta, "none")

    @property
    def head_weight(self) -> Tensor:
        """The weight of the LM head, [vocab, hidden]."""
        return self.decoder.head_weight

    @property
    def final_norm_weight(self) -> Tensor:
        """The weight of the norm before the LM head, [hidden]."""
        return self.decoder.final_norm_weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the rows of the embedding table, as heads read them: [..., hidden]."""
        return rows_at(self.decoder.embedding, tokens.reshape(-1)).view(*tokens.shape, -1)

    @torch.no_grad()
    def run(self, rows: PackedRows, taps: Sequence[Tap]) -> TargetOutputs:
        """Run packed rows [batch, length] through all layers."""
        metadata = PackedMetadata.of(rows.segments, rows.positions.long())
        features = FeatureSpec(layer_inputs=tuple(tap.layer_input for tap in taps))
        cache: Any = PackedCache(self.decoder.layer_plans)
        output = self.decoder.forward(rows.tokens.reshape(-1).long(), Pass(cache, metadata), features)
        shape = rows.tokens.shape
        tapped = output.hidden[:, :0] if output.features is None else output.features
        return TargetOutputs(
            tapped.view(*shape, -1), output.hidden.view(*shape, -1), rows.tokens, cache.by_heads(*shape)
        )

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return float32 log-probabilities [rows, ids] of some tokens for each row of final states, normalised over the
        whole vocabulary."""
        logits = self.decoder.logits(hidden)
        mass = logits.float().logsumexp(-1, keepdim=True)
        return logits.index_select(-1, token_ids).float() - mass

    @torch.no_grad()
    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return the likeliest next tokens [rows] for final states."""
        return self.decoder.logits(hidden).argmax(-1)
