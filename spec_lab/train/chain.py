"""Unrolls a drafter that runs one layer in each step, and has its own KV. A step takes all rows at once.

This is EAGLE-3's training-time test (Li et al., 2025): a drafter learns on the inputs that it will see when drafting. A
chain may pass through the same layer repeatedly (EAGLE-3, MTP-Eagle) or through several in turn (vanilla MTP).
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
    """A draft layer that takes a token's embedding and a hidden state, and returns the next hidden state."""

    @property
    def self_attn(self) -> SelfAttention:
        """The layer's attention, whose cache the unrolling keeps."""

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual `[batch, rows, hidden]`, and the input of attention `[batch, rows, input]`."""

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the hidden state to feed back, from the residual and attention's output, both `[batch, rows,
        hidden]`."""


def unroll_chain(
    layers: Sequence[ChainLayer],
    embeddings: Tensor,
    hidden: Tensor,
    rotation: Rotation,
    segments: Tensor | None = None,
) -> list[Tensor]:
    """Return the hidden states `[batch, rows, hidden]` of every step; step s is taken by `layers[s]`.

    At every step row p takes `embeddings[:, p]`, the embedding of token p+1. At step 0 it also takes `hidden[:, p]`,
    made from the target's states at position p. At a later step s it takes the hidden state that row p-1 returned at
    step s-1. So it ends a chain that began s rows earlier, at the row's anchor p-s. It attends to the rows up to the
    anchor as they were at step 0, and to its own chain. Drafting from p-s computes the same in its step s, if its
    earlier drafts are the text's own tokens. Rows p < s have no anchor and are meaningless.

    Each layer has its own cache. A layer that differs from that of the previous step projects the rows of all earlier
    steps again. `segments` `[batch, rows]` numbers the document of each row; None if an entry of the batch is one
    document. Chains that leave their document are meaningless.
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
        # Only the rows of this step, which were projected last, go on.
        attended = attend_chain(query, keys, values, visible)
        states.append(layer.leave(residual, layer.self_attn.merge(attended)))
        hidden = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
    return states


def attend_chain(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible: Tensor | None = None
) -> Tensor:
    """Return the attention output of the newest step's queries, `[batch, heads, rows, value_dim]`.

    `keys` and `values` `[batch, heads, rows, ...]` are ordered by step. Row p of step s sees rows 0..p-s of step 0, if
    `visible` `[batch, 1, rows, rows]` allows. Of each later step i it sees only row p-s+i, which is on its chain.
    Indexed by anchors a = p-s, this is causal attention plus one more key for each later step. One softmax covers both.
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
    lost = min(step, num_rows)
    return F.pad(read[:, :, : num_rows - lost], (0, 0, lost, 0))


def moved_up(heads: Tensor, num_rows: int) -> Tensor:
    """Shift row a + `num_rows` of `[batch, heads, rows, head_dim]` to row a, and fill up with zeros.

    The shape does not change, since products of irregular shapes are slow.
    """
    lost = min(num_rows, heads.shape[2])
    return F.pad(heads[:, :, lost:], (0, 0, 0, lost))
