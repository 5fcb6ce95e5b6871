"""Unrolling a one-layer drafter with a cache of its own: all chains of a text at once, every step in parallel.

This is EAGLE-3's training-time test (Li et al., 2025), so that a drafter learns on the inputs it will meet. The chain
may pass through one layer again and again (EAGLE-3, MTP-Eagle) or through one after another (vanilla MTP).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.train.layers import HeadsAttention, Rotation


class ChainLayer(Protocol):
    """A draft layer that reads a token's embedding and a hidden state, and leaves the next hidden state."""

    @property
    def self_attn(self) -> HeadsAttention:
        """The layer's attention, whose cache the unrolling keeps."""

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual `[batch, rows, hidden]`, and what attention projects `[batch, rows, input]`."""

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the hidden state to recycle, from the residual and what attention gave, `[batch, rows, hidden]`
        each."""


def unroll_chain(layers: Sequence[ChainLayer], embeddings: Tensor, hidden: Tensor, rotation: Rotation) -> list[Tensor]:
    """Return the hidden states `[batch, rows, hidden]` of every step; step s is taken by `layers[s]`.

    Row p pairs `embeddings[:, p]`, the embedding of token p+1, with `hidden[:, p]`, made from the target's position p.
    At step s the row stands at the end of a chain that began s rows before, at its anchor p-s: it takes the hidden
    state that row p-1 left at step s-1, and attends to the rows up to the anchor as they were at step 0 and to its own
    chain. So it equals the s-th recurrent step of drafting from p-s, provided the drafts before it are the text's own
    tokens. Rows p < s have no anchor; what they hold means nothing.

    A layer has a cache of its own: where it is not the layer of the step before, it projects the rows of all earlier
    steps anew.
    """
    inputs: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    for step, layer in enumerate(layers):
        inputs.append(hidden)
        if step > 0 and layer is not layers[step - 1]:
            keys, values = [], []
        for entering in inputs[len(keys) :]:
            residual, rows = layer.enter(embeddings, entering)
            query, key, value = layer.self_attn.project(rows, rotation)
            keys.append(key)
            values.append(value)
        # The last rows projected are those of this step: their queries and residuals go on.
        mask = chain_mask(step, embeddings.shape[1], embeddings.device)
        attended = F.scaled_dot_product_attention(query, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)
        states.append(layer.leave(residual, layer.self_attn.merge(attended, rows)))
        hidden = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
    return states


def chain_mask(step: int, num_rows: int, device: torch.device) -> Tensor:
    """Return `[rows, (step + 1) * rows]`, True where row p at `step` sees a key; keys stand step by step.

    Of step 0 it sees rows 0..p-step, of a later step i only row p-step+i: the chain that leads to it.
    """
    anchor = torch.arange(num_rows, device=device)[:, None] - step
    row = torch.arange(num_rows, device=device)[None, :]
    return torch.cat([row <= anchor] + [row == anchor + i for i in range(1, step + 1)], dim=1)
