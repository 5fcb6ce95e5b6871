"""Heads of block drafters: from left to right, a head scores each slot given the token before it.

Without a head each slot is drafted independently. Names of tensors are those of the checkpoints
(`checkpoints.block_config`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.block_config import BlockConfig, GruSizes, MarkovForm, MarkovSizes, SelectorSizes
from spec_lab.core.rows import rows_at
from spec_lab.models.blocks.scores import SlotScores
from spec_lab.models.linear import Linear, make_linear


@dataclass(slots=True)
class BlockRows:
    """A body's output for a head: the slots that hold drafts, first to last.

    Attributes:
        hidden: [batch, slots, hidden_size] after the final norm.
        logits: [batch, slots, draft vocabulary].
        context: [batch, hidden_size] the last context row of each request, for a head that reads it.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    context: torch.Tensor


@dataclass(slots=True)
class SlotWalk:
    """The progress of a head through the blocks of a batch.

    Attributes:
        hidden: [batch, slots, hidden_size].
        scores: [batch, slots, scored] the scores of each slot alone.
        state: [rows, width] the head's state between slots. There is a row for each request, or for each branch of a
            tree, ordered by request. A head without a state never reads it.
        ids: [batch, slots, scored] the tokens that are scored; None if these are the draft vocabulary.
        edges: [batch, slots, ...] the values that a head computes for all slots at once; None if there are none.
    """

    hidden: torch.Tensor
    scores: torch.Tensor
    state: torch.Tensor
    ids: torch.Tensor | None = None
    edges: torch.Tensor | None = None


class BlockHead(Protocol):
    """Turns the slots of a block into drafts.

    Attributes:
        reads_all_slots: it reads every slot that can hold a draft, even if fewer drafts are wanted.
    """

    reads_all_slots: bool

    def begin(self, rows: BlockRows) -> SlotWalk:
        """Return the walk before the first slot."""
        ...

    def scores(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> SlotScores:
        """Score slot `column` [1], from 0, after the tokens `previous` [rows], and advance the walk.

        There is a row of scores for each row of `previous`, or for each request if scores do not depend on `previous`.
        """
        ...

    def likeliest(self, walk: SlotWalk) -> torch.Tensor | None:
        """Return the likeliest tokens of all slots, [batch, slots]; None if slots depend on the drafts before them."""
        ...


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The parts from which a head is built.

    Attributes:
        embedding: [vocab, hidden_size] the checkpoint's, or the target's if it has none.
        token_map: [draft vocabulary] target ids; None if draft ids are target ids.
    """

    config: BlockConfig
    tensors: Mapping[str, torch.Tensor]
    embedding: torch.Tensor
    token_map: torch.Tensor | None

    @property
    def vocab_size(self) -> int:
        return self.config.body.vocab_size

    def linear(self, name: str) -> Linear:
        """Make a product of the tensors below `name`."""
        return make_linear(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens [rows] as the body embeds its own."""
        return scaled(rows_at(self.embedding, tokens), self.config.embedding_scale)

    def scored(self, scores: torch.Tensor) -> SlotScores:
        """Return scores [rows, draft vocabulary] together with their token ids."""
        return SlotScores(scores, self.token_map, self.vocab_size)

    def candidates(self, logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens of logits [batch, slots, draft vocabulary] and their logits, each [batch, slots,
        topk]."""
        values, ids = logits.topk(topk, dim=-1)
        return values, ids if self.token_map is None else self.token_map[ids]


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Return embeddings times a factor, which is rounded to their dtype as in Gemma's embedding."""
    return rows if scale == 1.0 else rows * float(torch.tensor(scale, dtype=rows.dtype))


def at_column(values: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Pick slot `column` [1] of [batch, slots, ...]."""
    return values.index_select(1, column).squeeze(1)


def behind(previous: torch.Tensor, values: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Pick slot `column` [1] of [batch, slots, ...], repeated to one entry for each row of `previous` [rows]."""
    picked = values.index_select(1, column)
    return picked.expand(-1, previous.shape[0] // values.shape[0], *picked.shape[2:]).flatten(0, 1)


def nothing_carried(hidden: torch.Tensor) -> torch.Tensor:
    """Return a placeholder state [batch, 1] for a head without one; `hidden` is [batch, slots, hidden_size]."""
    return hidden[:, 0, :1]


class JoinedSlots:
    """The common part of heads whose slots depend on the drafts before them."""

    def likeliest(self, walk: SlotWalk) -> torch.Tensor | None:
        return None


class IndependentSlots:
    """drafter.head=none: a slot's draft does not depend on the token before it."""

    reads_all_slots = False

    def __init__(self, scored: Callable[[torch.Tensor], SlotScores]) -> None:
        """`scored`: adds the token ids to logits [rows, draft vocabulary]."""
        self._scored = scored

    def begin(self, rows: BlockRows) -> SlotWalk:
        return SlotWalk(rows.hidden, rows.logits, nothing_carried(rows.hidden))

    def scores(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> SlotScores:
        return self._scored(at_column(walk.scores, column))

    def likeliest(self, walk: SlotWalk) -> torch.Tensor | None:
        return self._scored(walk.scores.flatten(0, 1)).greedy(walk.hidden).view(walk.scores.shape[:2])


class MarkovHead(JoinedSlots):
    """drafter.head=markov: the previous token adds a low-rank bias to the logits (DSpark)."""

    reads_all_slots = False

    def __init__(self, sizes: MarkovSizes, parts: HeadParts) -> None:
        self._parts = parts
        self._embedding = parts.tensors["markov_head.markov_w1.weight"]
        self._bias = make_linear(parts.tensors["markov_head.markov_w2.weight"])
        self._rank = sizes.rank
        self._form = sizes.form
        projections = {MarkovForm.gated: "gate_proj", MarkovForm.rnn: "joint_proj"}
        name = projections.get(sizes.form)
        self._project = None if name is None else parts.linear(f"markov_head.{name}")

    def begin(self, rows: BlockRows) -> SlotWalk:
        return SlotWalk(rows.hidden, rows.logits, rows.hidden.new_zeros(rows.hidden.shape[0], self._rank))

    def scores(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> SlotScores:
        read = self._read(walk, rows_at(self._embedding, previous), behind(previous, walk.hidden, column))
        return self._parts.scored(behind(previous, walk.scores, column) + self._bias(read))

    def _read(self, walk: SlotWalk, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._project is None:
            return previous
        if self._form is MarkovForm.gated:
            return torch.sigmoid(self._project(torch.cat((hidden, previous), dim=-1))) * previous
        gate, candidate, out = self._project(torch.cat((walk.state, previous, hidden), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        walk.state = gate * walk.state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(out)


class GruHead(JoinedSlots):
    """drafter.head=gru: a GRU reads the tokens of the block so far, and corrects every draft but the first (Domino)."""

    reads_all_slots = False

    def __init__(self, sizes: GruSizes, parts: HeadParts) -> None:
        self._parts = parts
        self._state_size = sizes.state_size
        self._of_input = make_linear(parts.tensors["prefix_gru.weight_ih_l0"])
        self._of_state = make_linear(parts.tensors["prefix_gru.weight_hh_l0"])
        self._narrow, self._wide = parts.linear("embed_proj.0"), parts.linear("embed_proj.2")

    def begin(self, rows: BlockRows) -> SlotWalk:
        return SlotWalk(rows.hidden, rows.logits, rows.hidden.new_zeros(rows.hidden.shape[0], self._state_size))

    def scores(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> SlotScores:
        walk.state = self._moved(self._parts.embedded(previous), walk.state)
        read = torch.cat((behind(previous, walk.hidden, column), walk.state), dim=-1)
        correction = self._wide(F.silu(self._narrow(read)))
        return self._parts.scored(behind(previous, walk.scores, column) + torch.where(column > 0, correction, 0.0))

    def _moved(self, token: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Run a step of `torch.nn.GRU`, without biases."""
        reset, update, new = self._of_input(token).chunk(3, dim=-1)
        reset_of_state, update_of_state, new_of_state = self._of_state(state).chunk(3, dim=-1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_of_state) * new_of_state)
        return new + torch.sigmoid(update + update_of_state) * (state - new)


class SelectorHead(JoinedSlots):
    """drafter.head=selector: scores the likeliest tokens of a slot by how well each follows the previous token
    (DFlash2)."""

    reads_all_slots = False

    def __init__(self, sizes: SelectorSizes, parts: HeadParts) -> None:
        self._parts = parts
        self._topk = sizes.topk
        self._before = parts.tensors["candidate_selector.predecessor_codebook"]
        self._behind = parts.tensors["candidate_selector.successor_codebook"]
        self._project = parts.linear("candidate_selector.hidden_projection")

    def begin(self, rows: BlockRows) -> SlotWalk:
        scores, ids = self._parts.candidates(rows.logits, self._topk)
        successors = rows_at(self._behind, ids.flatten()).view(*ids.shape, -1)
        # A pair's score sums the elementwise product of three vectors: the candidate's, the hidden row's, and the
        # previous token's. The first two are multiplied here, for all slots at once.
        projected = self._project(rows.hidden.flatten(0, 1)).view(*ids.shape[:2], 1, -1)
        return SlotWalk(rows.hidden, scores, nothing_carried(rows.hidden), ids, edges=successors * projected)

    def scores(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> SlotScores:
        assert walk.ids is not None and walk.edges is not None
        pairs = torch.einsum("bkr,br->bk", behind(previous, walk.edges, column), rows_at(self._before, previous))
        alone, ids = (behind(previous, values, column) for values in (walk.scores, walk.ids))
        return SlotScores(alone + pairs, ids, self._parts.vocab_size)
