"""The EAGLE-3 draft head as trained: its parameters under their checkpoint names, and the training-time test.

EAGLE-3 (Li et al., 2025): the head reads three layers of the target at step 0, and its own hidden states from then on.
Training unrolls it over several steps, so that it learns on the inputs it will meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Sizes of a head; `hidden_size` and `vocab_size` are the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int


class RMSNorm(nn.Module):
    """Scale to unit mean square, in float32 whatever the surroundings compute in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.float()
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + RMS_NORM_EPS) * self.weight


class Eagle3Attention(nn.Module):
    """Projections only: what attends to what is the unrolling's business."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        input_size = 2 * shape.hidden_size
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(input_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values `[batch, heads, rows, head_dim]`; keys and values repeated for their query heads."""
        query = rotation.apply(self._split(self.q_proj(hidden)))
        key = rotation.apply(self._split(self.k_proj(hidden)))
        value = self._split(self.v_proj(hidden))
        queries_per_key = query.shape[1] // key.shape[1]
        return query, key.repeat_interleave(queries_per_key, 1), value.repeat_interleave(queries_per_key, 1)

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size)
        self.self_attn = Eagle3Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = SwiGLU(shape)


class Eagle3Head(nn.Module):
    """The head; `state_dict()` is the checkpoint.

    `d2t[i]` is what to add to draft id i for the target's id, `t2d[v]` whether target id v has a draft id.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Eagle3Shape, draft_token_ids: Tensor) -> None:
        """`draft_token_ids` `[draft_vocab_size]`: the target ids the head can draft, ascending."""
        super().__init__()
        assert draft_token_ids.shape == (shape.draft_vocab_size,) and bool((draft_token_ids.diff() > 0).all())
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = RMSNorm(shape.hidden_size)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_token_ids - torch.arange(shape.draft_vocab_size))
        is_drafted = torch.zeros(shape.vocab_size, dtype=torch.bool)
        is_drafted[draft_token_ids] = True
        self.register_buffer("t2d", is_drafted)

    def draft_token_ids(self) -> Tensor:
        """`[draft_vocab_size]`: the target id of every draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`[..., draft_vocab_size]` from a hidden state as the layer leaves it."""
        return self.lm_head(self.norm(hidden))

    def unroll(self, embeddings: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """The training-time test: hidden states `[batch, rows, hidden]` of every step.

        Row p pairs `embeddings[:, p]`, the embedding of token p+1, with `features[:, p]` `[3 * hidden]`, the target's
        taps at position p. At step s the row stands at the end of a chain that began s rows before, at its anchor p-s:
        it takes the hidden state that row p-1 left at step s-1, and attends to the rows up to the anchor as they were
        at step 0 and to its own chain. So it equals the s-th recurrent step of drafting from p-s, provided the drafts
        before it are the text's own tokens. Rows p < s have no anchor; what they hold means nothing.
        """
        num_rows = embeddings.shape[1]
        rotation = Rotation.of_rows(num_rows, self.shape.head_dim, embeddings.device)
        hidden = self.fc(features).float()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        for step in range(num_steps):
            layer = self.midlayer
            wide = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
            query, key, value = layer.self_attn.project(wide, rotation)
            keys.append(key)
            values.append(value)
            mask = chain_mask(step, num_rows, embeddings.device)
            attended = F.scaled_dot_product_attention(query, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)
            hidden = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            states.append(hidden)
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return states


def chain_mask(step: int, num_rows: int, device: torch.device) -> Tensor:
    """`[rows, (step + 1) * rows]`, True where row p at `step` sees a key; keys stand step by step.

    Of step 0 it sees rows 0..p-step, of a later step i only row p-step+i: the chain that leads to it.
    """
    anchor = torch.arange(num_rows, device=device)[:, None] - step
    row = torch.arange(num_rows, device=device)[None, :]
    return torch.cat([row <= anchor] + [row == anchor + i for i in range(1, step + 1)], dim=1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of rows 0.. in the half-split layout of Llama; `cos` and `sin` are `[rows, head_dim]`."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of_rows(cls, num_rows: int, head_dim: int, device: torch.device) -> Rotation:
        frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
        angles = torch.outer(torch.arange(num_rows, device=device).float(), frequencies).repeat(1, 2)
        return cls(angles.cos(), angles.sin())

    def apply(self, heads: Tensor) -> Tensor:
        """Rotates `[batch, heads, rows, head_dim]`, keeping its dtype."""
        first, second = heads.float().chunk(2, dim=-1)
        return (heads * self.cos + torch.cat([-second, first], dim=-1) * self.sin).to(heads.dtype)
