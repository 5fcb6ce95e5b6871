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

from spec_lab.train.layers import Rotation, SelfAttention
from spec_lab.train.packed_attention import visible_rows, window_rows


class ChainLayer(Protocol):
    """A draft layer that reads a token's embedding and a hidden state, and leaves the next hidden state."""

    @property
    def self_attn(self) -> SelfAttention:
        """The layer's attention, whose cache the unrolling keeps."""

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual `[batch, rows, hidden]`, and what attention projects `[batch, rows, input]`."""

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the hidden state to recycle, from the residual and what attention gave, `[batch, rows, hidden]`
        each."""


def unroll_chain(
    layers: Sequence[ChainLayer],
    embeddings: Tensor,
    hidden: Tensor,
    rotation: Rotation,
    segments: Tensor | None = None,
) -> list[Tensor]:
    """Return the hidden states `[batch, rows, hidden]` of every step; step s is taken by `layers[s]`.

    Row p pairs `embeddings[:, p]`, the embedding of token p+1, with `hidden[:, p]`, made from the target's position p.
    At step s the row stands at the end of a chain that began s rows before, at its anchor p-s: it takes the hidden
    state that row p-1 left at step s-1, and attends to the rows up to the anchor as they were at step 0 and to its own
    chain. So it equals the s-th recurrent step of drafting from p-s, provided the drafts before it are the text's own
    tokens. Rows p < s have no anchor; what they hold means nothing.

    A layer has a cache of its own: where it is not the layer of the step before, it projects the rows of all earlier
    steps anew. `segments` `[batch, rows]` keeps documents that share a row apart; chains that leave
    theirs mean nothing.
    """
    inputs: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    visible = None if segments is None else visible_rows(segments)
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
        attended = attend_chain(query, keys, values, visible)
        states.append(layer.leave(residual, layer.self_attn.merge(attended)))
        hidden = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
    return states


def attend_chain(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible: Tensor | None = None
) -> Tensor:
    """Return what the queries of the newest step read, `[batch, heads, rows, value_dim]`.

    `keys` and `values` `[batch, heads, rows, ...]` stand step by step. Row p of step s sees rows 0..p-s of step 0, as
    far as `visible` `[batch, 1, rows, rows]` allows, and of a later step i only row p-s+i, of the chain that leads to
    it. Counted by anchors a = p-s that is plain causal attention and one key a step beside it, which are joined here.
    """
    step = len(keys) - 1
    if step == 0:
        if visible is None:
            return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        return F.scaled_dot_product_attention(query, keys[0], values[0], attn_mask=visible)
    num_rows, scale = query.shape[2], query.shape[3] ** -0.5
    sees = window_rows(num_rows, None, query.device) if visible is None else visible
    query = moved_up(query, step) * scale
    scores = (query @ keys[0].mT).float().masked_fill(~sees, float("-inf"))
    chain = [moved_up(key, i) for i, key in enumerate(keys[1:], start=1)]
    own = torch.stack([(query * key).float().sum(-1) for key in chain])
    mass = torch.logaddexp(scores.logsumexp(-1), own.logsumexp(0))
    read = (scores - mass[..., None]).exp().to(query.dtype) @ values[0]
    shares = (own - mass).exp().to(query.dtype)
    for i, (share, value) in enumerate(zip(shares, values[1:], strict=True), start=1):
        read = read + share[..., None] * moved_up(value, i)
    return F.pad(read[:, :, : num_rows - step], (0, 0, step, 0))


def moved_up(heads: Tensor, num_rows: int) -> Tensor:
    """Bring row a + `num_rows` of `[batch, heads, rows, head_dim]` to row a; the last rows are zero.

    The number of rows stays what it is, since products of odd shapes are slow.
    """
    return F.pad(heads[:, :, num_rows:], (0, 0, 0, num_rows))
