"""What a plan counts drafts by: positions of a chain, or rows of a tree."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from spec_lab.core.types import Sequence
from spec_lab.engine.rates import Array, Flags, Integers


class JudgedDrafts(Protocol):
    """Says of which drafts a round showed whether they are accepted.

    Attributes:
        counts: the numbers of drafts that a round may verify, ascending from 0.
        num_drafts: the largest of them, K.
    """

    counts: Integers
    num_drafts: int

    def outcome(self, sequence: Sequence) -> tuple[int, ...]:
        """Return numbers that say what the last round of a request showed."""
        ...

    def flags(self, outcomes: Integers) -> tuple[Flags, Flags]:
        """Return from `outcomes` [..., numbers] which drafts [..., K] were judged, and which of these accepted."""
        ...

    def tokens(self, rates: Array) -> Array:
        """Return the tokens [K + 1] of a round of all requests by the number of drafts, from the rates [batch, K] of
        acceptance where a draft is judged."""
        ...


class ChainPositions:
    """A chain's draft is judged where all before it are accepted."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_drafts = num_draft_tokens
        self.counts: Integers = np.arange(num_draft_tokens + 1)
        per_round = self.counts + 1
        self._begins = (self.counts % per_round[:, None] == 0).astype(np.float64).T
        self._left_over = -per_round[-1] % per_round / per_round

    def outcome(self, sequence: Sequence) -> tuple[int, ...]:
        return sequence.offered_per_round[-1], sequence.accepted_per_round[-1]

    def flags(self, outcomes: Integers) -> tuple[Flags, Flags]:
        offered, accepted = outcomes[..., 0, None], outcomes[..., 1, None]
        return self.counts[:-1] < np.minimum(offered, accepted + 1), self.counts[:-1] < accepted

    def tokens(self, rates: Array) -> Array:
        """A run of accepted drafts that a smaller K cuts goes on in the next round: it takes as many rounds as begin in
        it. One of all K goes on as often as its last draft is accepted, and then leaves no part of a round over."""
        reached = np.concatenate((np.ones((len(rates), 1)), rates.cumprod(axis=1)), axis=1)
        rounds = reached @ self._begins - np.outer(reached[:, -1] * rates[:, -1], self._left_over)
        tokens: Array = (reached.sum(axis=1, keepdims=True) / rounds).sum(axis=0)
        return tokens


class TreeRows:
    """A tree's rows stand best first, so that fewer of them are a tree too. Each one that is verified is judged.

    A round has 2, 4, 8, ... rows with the root, or all: in a captured mode each number is a graph.
    """

    def __init__(self, num_rows: int, depth: int) -> None:
        self.num_drafts = num_rows - 1
        powers = [2**power - 1 for power in range(num_rows.bit_length())]
        self.counts: Integers = np.array([*(count for count in powers if count < self.num_drafts), self.num_drafts])
        self._depth = depth
        self._rows = np.arange(1, num_rows)

    def outcome(self, sequence: Sequence) -> tuple[int, ...]:
        num_rows, path = sequence.tree_per_round[-1]
        return num_rows, *path, *[0] * (self._depth - len(path))

    def flags(self, outcomes: Integers) -> tuple[Flags, Flags]:
        on_path: Flags = (self._rows[:, None] == outcomes[..., None, 1:]).any(axis=-1)
        return self._rows < outcomes[..., 0, None], on_path

    def tokens(self, rates: Array) -> Array:
        return len(rates) + np.concatenate(([0.0], rates.sum(axis=0).cumsum()))
