"""Heads that draft one token after another: training unrolls their steps over all rows at once.

This is EAGLE-3's training-time test (Li et al., 2025): a head learns on the inputs that it will see when drafting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from spec_lab.train.group import Processes
from spec_lab.train.head import Forced, HeadRecipe
from spec_lab.train.layers import Rotation, SelfAttention
from spec_lab.train.losses import LOSSES, chunks
from spec_lab.train.packed import PackedRows, visible_rows
from spec_lab.train.target import FrozenTarget, TargetOutputs

if TYPE_CHECKING:
    from spec_lab.engine.engine import Engine
    from spec_lab.train.serving import Serving


@dataclass(frozen=True, slots=True)
class Places:
    """The places of rows: `positions` [batch, rows] within texts, and the texts `segments` [batch, rows]."""

    positions: Tensor
    segments: Tensor


class UnrolledModule(nn.Module, ABC):
    """The weights of an unrolled head. Row p of a text takes token p+1 and the target's states at p."""

    @abstractmethod
    def features(self, outputs: TargetOutputs) -> tuple[Tensor, ...]:
        """Return the states of the target that it reads, at all positions; rows are the next-to-last dimension."""

    @abstractmethod
    def unroll(self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, places: Places) -> list[Tensor]:
        """Return a state `[batch, rows, ...]` for each step. Row p of `embeddings` `[batch, rows, hidden]` is token
        p+1's.

        Row p of step s drafts token p+2 from the anchor p-s. It uses the inputs known at the anchor, and the text's
        tokens p-s+2..p+1 as the earlier drafts. Rows p < s may hold any finite values.
        """

    @abstractmethod
    def draft_logits(self, state: Tensor) -> Tensor:
        """Return `[..., draft_vocab_size]` from a state of `unroll`."""

    @abstractmethod
    def draft_token_ids(self) -> Tensor:
        """Return `[draft_vocab_size]`: the target id of every draft id."""


@dataclass
class Unrolled(HeadRecipe):
    """The knobs of unrolled heads: step i counts `step_loss_decay ** i` in the loss."""

    num_unrolled_steps: int = 5
    step_loss_decay: float = 0.8

    def drawn(self, rows: PackedRows, generator: torch.Generator) -> tuple[Tensor, ...]:
        return ()

    @torch.no_grad()
    def inputs(
        self, module: UnrolledModule, target: FrozenTarget, rows: PackedRows, *drawn: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the inputs of `UnrolledLoss`. There is a row for each token, so that shapes are even; the last two do
        not count."""
        outputs = target.run(rows, self.taps(target))
        return (
            target.embed(F.pad(rows.tokens.long()[:, 1:], (0, 1))),
            F.pad(outputs.final_hidden[:, 1:], (0, 0, 0, 1)),
            counted_rows(rows.segments, rows.is_supervised, self.num_unrolled_steps),
            rows.positions,
            rows.segments,
            *module.features(outputs),
        )

    def loss_module(self, module: UnrolledModule, target: FrozenTarget, group: Processes) -> UnrolledLoss:
        return UnrolledLoss(module, target, self, group)

    def compiled(self, loss: Any) -> Callable[..., Tensor]:
        """Compile the unrolling and the loss of a chunk separately."""
        loss.unroll, loss.of_chunk = torch.compile(loss.unroll), torch.compile(loss.of_chunk)
        found: Callable[..., Tensor] = loss
        return found

    @torch.no_grad()
    def laws(
        self, module: UnrolledModule, target: FrozenTarget, rows: PackedRows, pending: Tensor, num_drafts: int
    ) -> Tensor:
        embeddings, _, _, positions, segments, *features = self.inputs(module, target, rows)
        states = module.unroll(embeddings, tuple(features), num_drafts, Places(positions, segments))
        # Draft s after column c is made in row c - 1 + s.
        return torch.stack([module.draft_logits(state[0, pending - 1 + s]) for s, state in enumerate(states)], 1)

    def served(self, serving: Serving, engine: Engine, text: Tensor, prompt_length: int) -> Tensor:
        return serving.step_laws(engine, text, prompt_length)

    @torch.no_grad()
    def forced(
        self, module: UnrolledModule, target: FrozenTarget, rows: PackedRows, num_drafts: int, batch_size: int
    ) -> Forced:
        counts = Forced([0] * num_drafts, [0] * num_drafts)
        for start in range(0, len(rows), batch_size):
            part = rows.rows(slice(start, start + batch_size))
            embeddings, hidden, _, positions, segments, *features = self.inputs(module, target, part)
            counted = counted_rows(part.segments, part.is_supervised, num_drafts)
            with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=target.in_16_bits):
                states = module.unroll(embeddings, tuple(features), num_drafts, Places(positions, segments))
                agrees = agreement(counts, module, target, hidden, counted[0], states)
            alive = counted[0]
            for step, agreed in enumerate(agrees):
                # Column a is the anchor at row a, whose draft of this step is in row a + step.
                alive = alive[:, : alive.shape[1] - (step > 0)] & counted[step][:, step:]
                counts.reached[step] += int(alive.sum())
                alive = alive & agreed[:, step:]
                counts.matched[step] += int(alive.sum())
        return counts


def agreement(
    counts: Forced,
    module: UnrolledModule,
    target: FrozenTarget,
    hidden: Tensor,
    counted: Tensor,
    states: Sequence[Tensor],
) -> list[Tensor]:
    """Return for each step whether each row's draft is the target's likeliest token, bool [batch, rows]."""
    ids, flat, flat_counted = module.draft_token_ids(), hidden.flatten(0, 1), counted.flatten()
    found: list[list[Tensor]] = [[] for _ in states]
    for part in chunks(len(flat), target.config.vocab_size):
        best = target.likeliest(flat[part])
        mass = target.log_probabilities(flat[part], ids).exp().sum(-1)
        counts.lost += float(((1 - mass) * flat_counted[part]).sum())
        for agreed, state in zip(found, states, strict=True):
            agreed.append(ids[module.draft_logits(state.flatten(0, 1)[part]).argmax(-1)] == best)
    counts.num_rows += int(flat_counted.sum())
    return [torch.cat(agreed).view(counted.shape) for agreed in found]


def counted_rows(segments: Tensor, is_supervised: Tensor, num_steps: int) -> Tensor:
    """Return bool [num_steps, batch, length]: the rows that a step counts.

    Row p of step s drafts token p+2 from the anchor p-s, whose next token is p-s+1. It counts if the target wrote both
    tokens, in one text.
    """
    length = segments.shape[1]
    texts = torch.where(is_supervised, segments, -1)
    drafted = F.pad(texts[:, 2:], (0, 2), value=-1)
    pending = (F.pad(texts[:, 1:], (step, 1), value=-2)[:, :length] for step in range(num_steps))
    return torch.stack([(drafted == text) & (drafted >= 0) for text in pending])


class UnrolledLoss(nn.Module):
    """The mean loss of every step over the rows that it counts; step i has the weight `decay ** i`.

    Logits are computed for one chunk of rows at a time. With several chunks they are recomputed for gradients, so that
    memory is bounded.
    """

    step_weights: Tensor

    def __init__(self, module: UnrolledModule, target: FrozenTarget, knobs: Unrolled, group: Processes) -> None:
        super().__init__()
        self.module = module
        self._group, self._target, self._row_loss = group, target, LOSSES[knobs.loss]
        weights = torch.tensor([knobs.step_loss_decay**step for step in range(knobs.num_unrolled_steps)])
        self.register_buffer("step_weights", weights / weights.sum(), persistent=False)

    def forward(
        self,
        embeddings: Tensor,
        next_hidden: Tensor,
        counts: Tensor,
        positions: Tensor,
        segments: Tensor,
        *features: Tensor,
    ) -> Tensor:
        """Compute the loss of `Unrolled.inputs`."""
        states = self.unroll(embeddings, features, len(self.step_weights), Places(positions, segments))
        num_counted = counts.sum((1, 2))
        self._group.add_up(num_counted)  # the mean is over the rows of all processes
        weights = (counts * (self.step_weights / num_counted.clamp(min=1))[:, None, None]).flatten(1)
        hidden, flat = next_hidden.flatten(0, 1), [state.flatten(0, 1) for state in states]
        if hidden.device.type == "cpu":  # a captured step has fixed shapes; elsewhere rows of prompts need no logits
            kept = (weights > 0).any(0).nonzero()[:, 0]
            hidden, weights, flat = hidden[kept], weights[:, kept], [state[kept] for state in flat]
        cut = chunks(len(hidden), self._target.config.vocab_size)
        if len(cut) == 1:
            return self.of_chunk(hidden, weights, *flat)
        parts = [(hidden[rows], weights[:, rows], *(state[rows] for state in flat)) for rows in cut]
        each = [recomputed(self.of_chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(each).sum()

    def unroll(self, *inputs: Any) -> list[Tensor]:
        """Return the module's states of each step."""
        return self.module.unroll(*inputs)

    def of_chunk(self, hidden: Tensor, weights: Tensor, *states: Tensor) -> Tensor:
        log_p = self._target.log_probabilities(hidden, self.module.draft_token_ids())
        total = torch.zeros((), device=hidden.device)
        for state, weight in zip(states, weights, strict=True):
            row_loss = self._row_loss(self.module.draft_logits(state), log_p)
            total = total + torch.where(weight > 0, weight * row_loss, 0.0).sum()
        return total


class ChainLayer(Protocol):
    """A layer that takes a token's embedding and a hidden state, and returns the next hidden state."""

    @property
    def self_attn(self) -> SelfAttention:
        """The layer's attention, whose cache the unrolling keeps."""

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual `[batch, rows, hidden]`, and the input of attention `[batch, rows, input]`."""

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the hidden state to feed back, from the residual and attention's output, both `[batch, rows,
        hidden]`."""


def unroll_chain(
    layer: ChainLayer, embeddings: Tensor, hidden: Tensor, rotation: Rotation, segments: Tensor, num_steps: int
) -> list[Tensor]:
    """Return the hidden states `[batch, rows, hidden]` of every step of a one-layer head.

    At every step row p takes `embeddings[:, p]`, the embedding of token p+1. At step 0 it also takes `hidden[:, p]`,
    made from the target's states at position p. At a later step s it takes the hidden state that row p-1 returned at
    step s-1. So it ends a chain that began s rows earlier, at the row's anchor p-s. It attends to the rows up to the
    anchor as they were at step 0, and to its own chain. Drafting from p-s computes the same in its step s, if its
    earlier drafts are the text's own tokens. Rows p < s have no anchor and are meaningless, as are chains that leave
    their text.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    visible = visible_rows(segments)
    for _ in range(num_steps):
        residual, rows = layer.enter(embeddings, hidden)
        query, key, value = layer.self_attn.project(rows, rotation)
        keys.append(key)
        values.append(value)
        attended = attend_chain(query, keys, values, visible)
        states.append(layer.leave(residual, layer.self_attn.merge(attended)))
        hidden = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
    return states


def attend_chain(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible: Tensor) -> Tensor:
    """Return the attention output of the newest step's queries, `[batch, heads, rows, value_dim]`.

    `keys` and `values` `[batch, heads, rows, ...]` are ordered by step. Row p of step s sees rows 0..p-s of step 0, if
    `visible` `[batch, 1, rows, rows]` allows. Of each later step i it sees only row p-s+i, which is on its chain.
    Indexed by anchors a = p-s, this is causal attention plus one more key for each later step. One softmax covers both.
    """
    step, num_rows = len(keys) - 1, query.shape[2]
    if step == 0:
        return F.scaled_dot_product_attention(query, keys[0], values[0], attn_mask=visible)
    query = moved_up(query, step) * query.shape[3] ** -0.5
    scores = (query @ keys[0].mT).float().masked_fill(~visible, float("-inf"))
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
