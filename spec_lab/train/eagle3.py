"""The trainable EAGLE-3 draft head, with parameters under their checkpoint names.

EAGLE-3 (Li et al., 2025): the head reads three layers of the target at step 0, and its own hidden states afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.train.chain import unroll_chain
from spec_lab.train.layers import AttentionShape, RotaryFrequencies, SelfAttention, SwiGLU, TrainableRMSNorm
from spec_lab.train.packed_rows import RowPlaces
from spec_lab.train.unroll import TapsRead, UnrolledDrafter

NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Sizes of a head; `hidden_size` and `vocab_size` are the target's.

    `norms_taps` and `norms_output` are EAGLE-3.1's: a norm for each tap before `fc`, and feeding back the output of the
    final norm.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(10000.0, "none"))
    norms_taps: bool = False
    norms_output: bool = False

    def attention(self) -> AttentionShape:
        """The attention, whose input is the embedding concatenated with the hidden state."""
        return AttentionShape(2 * self.hidden_size, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the embedding concatenated with the hidden state; a `ChainLayer`."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape.attention())
        self.post_attention_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TrainableEagle3Head(UnrolledDrafter):
    """The head, which is its own `ChainLayer`; `state_dict()` is the checkpoint.

    `i + d2t[i]` is the target id of draft id i, and `t2d[v]` tells whether target id v has a draft id.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Eagle3Shape, draft_token_ids: Tensor) -> None:
        """`draft_token_ids` `[draft_vocab_size]`: the target ids the head can draft, ascending."""
        super().__init__()
        assert draft_token_ids.shape == (shape.draft_vocab_size,) and bool((draft_token_ids.diff() > 0).all())
        self.shape = shape
        self.fc = nn.Linear(NUM_TAPS * shape.hidden_size, shape.hidden_size, bias=False)
        num_norms = NUM_TAPS if shape.norms_taps else 0
        self.fc_norm = nn.ModuleList(TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(num_norms))
        self.midlayer = Eagle3Layer(shape)
        self.norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_token_ids - torch.arange(shape.draft_vocab_size))
        is_drafted = torch.zeros(shape.vocab_size, dtype=torch.bool)
        is_drafted[draft_token_ids] = True
        self.register_buffer("t2d", is_drafted)
        self.rotary = RotaryFrequencies(shape.rope, shape.head_dim)

    @property
    def self_attn(self) -> SelfAttention:
        """The attention of its layer."""
        return self.midlayer.self_attn

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.enter(embeddings, hidden)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the state to feed back: the layer's output, normed if `norms_output` is set."""
        hidden = self.midlayer.leave(residual, attended)
        return self.norm(hidden) if self.shape.norms_output else hidden

    def features(self, outputs: TapsRead) -> tuple[Tensor]:
        """Return the taps `[batch, rows, 3 * hidden]`."""
        return (outputs.taps()[:, :-1],)

    def draft_token_ids(self) -> Tensor:
        """Return `[draft_vocab_size]`: the target id of every draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[..., draft_vocab_size]` from a state of `unroll`."""
        return self.lm_head(state if self.shape.norms_output else self.norm(state))

    def unroll(
        self,
        embeddings: Tensor,
        features: tuple[Tensor, ...],
        num_steps: int,
        rows: RowPlaces | None = None,
    ) -> list[Tensor]:
        """Unroll the head like EAGLE-3's training-time test; see `unroll_chain`."""
        (taps,) = features
        rows = rows or RowPlaces.of_one_document(embeddings)
        return unroll_chain([self] * num_steps, embeddings, self.fuse(taps), self.rotary(rows.positions), rows.segments)

    def fuse(self, taps: Tensor) -> Tensor:
        """Return the first step's input from the taps, `[batch, rows, hidden]`."""
        if self.shape.norms_taps:
            parts = taps.unflatten(-1, (NUM_TAPS, -1)).unbind(-2)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps).float()
