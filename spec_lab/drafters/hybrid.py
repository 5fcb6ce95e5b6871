"""Combines a suffix tree with a model's head. In each round a request takes the drafts of the better one.

The better one is that with the higher expected number of accepted drafts. The tree's number is its score, scaled by how
right its earlier guesses were. The head's number is the running mean of its accepted drafts. Guesses of the tree are
compared with the text even if they were not offered. The head catches up and drafts in every round, so that its cache
has no holes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from spec_lab.core.types import Sequence
from spec_lab.drafters.suffix import SuffixLookup, SuffixSizes
from spec_lab.drafters.suffix_tree import SuffixDraft

NEWEST = 0.2
"""The weight of the newest round in a running mean."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """A continuation that the tree proposed for the text from `start` on, offered or not."""

    start: int
    found: SuffixDraft

    def is_known(self, tokens: list[int]) -> bool:
        return len(tokens) >= self.start + len(self.found.tokens)

    def num_right(self, tokens: list[int]) -> int:
        """Count the leading tokens of the guess that match the text."""
        pairs = zip(self.found.tokens, tokens[self.start :], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(slots=True)
class _Means:
    """Running means.

    Attributes:
        head: accepted drafts in the head's rounds.
        score: the scores of the tree's guesses.
        right: the number of correct tokens in the tree's guesses.
    """

    head: float
    score: float = 1.0
    right: float = 1.0

    def take_head(self, accepted: int) -> None:
        self.head += NEWEST * (accepted - self.head)

    def take_guess(self, guess: _Guess, tokens: list[int]) -> None:
        self.score += NEWEST * (guess.found.score - self.score)
        self.right += NEWEST * (guess.num_right(tokens) - self.right)

    def prefer_tree(self, found: SuffixDraft) -> bool:
        """Return whether the tree's score, scaled by right / score, exceeds the head's mean."""
        return found.score * self.right > self.head * self.score


@dataclass(slots=True)
class _Seen:
    """The state of a request: its means, the rounds seen, and guesses that its text does not cover yet."""

    means: _Means
    num_rounds: int = 0
    guesses: list[_Guess] = field(default_factory=list)


class HybridLookup(SuffixLookup):
    """Drafts with the tree on the host, for requests where it is expected to do better than the head."""

    def __init__(self, sizes: SuffixSizes, names: tuple[str, str], head_drafts: int) -> None:
        """`names`: of the tree and the head, for the record; `head_drafts`: drafts that the head makes in a round."""
        self.part_names = names
        self.num_on_device = head_drafts
        super().__init__(sizes)

    def restart(self) -> None:
        super().restart()
        self._seen: dict[str, _Seen] = {}
        self._usual = _Means(self.num_on_device / 2)  # means over all requests, with which a new request starts

    def draft(self, sequences: Iterable[Sequence]) -> list[list[int] | None]:
        return [self._draft(sequence) for sequence in sequences]

    def finish(self, sequence: Sequence) -> None:
        super().finish(sequence)
        self._seen.pop(sequence.request.request_id, None)

    def _draft(self, sequence: Sequence) -> list[int] | None:
        seen = self._seen.setdefault(sequence.request.request_id, _Seen(replace(self._usual)))
        self._take_rounds(seen, sequence)
        found = self.look_up(sequence)
        if found.tokens:
            seen.guesses.append(_Guess(len(sequence.tokens), found))
        return found.tokens if seen.means.prefer_tree(found) else None

    def _take_rounds(self, seen: _Seen, sequence: Sequence) -> None:
        """Update the means with the new rounds of a request, and with the guesses that its text now covers."""
        assert self.part_names is not None
        rounds = zip(sequence.accepted_per_round, sequence.drafted_by, strict=True)
        by_head = [accepted for accepted, by in list(rounds)[seen.num_rounds :] if by == self.part_names[1]]
        seen.num_rounds = len(sequence.drafted_by)
        decided = [guess for guess in seen.guesses if guess.is_known(sequence.tokens)]
        seen.guesses = [guess for guess in seen.guesses if not guess.is_known(sequence.tokens)]
        for means in (seen.means, self._usual):
            for accepted in by_head:
                means.take_head(accepted)
            for guess in decided:
                means.take_guess(guess, sequence.tokens)
