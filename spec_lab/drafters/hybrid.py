"""A suffix tree beside a model's head: each round and request takes the one that is expected to be accepted further.

The tree expects its score, times what of its scores came true; the head what it had accepted of late. What the tree
guessed is compared with the text also where it was not offered. The head catches up and drafts in every round, so that
its state never has a hole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import DraftStep, Request, Sequence, VerifiedRound
from spec_lab.drafters.suffix import SuffixSizes, SuffixTexts
from spec_lab.drafters.suffix_tree import SuffixDraft

NEWEST = 0.2
"""The weight of the newest round in a running mean."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """A continuation that the tree had for the text from `start` on, offered or not."""

    start: int
    found: SuffixDraft

    def is_known(self, tokens: list[int]) -> bool:
        return len(tokens) >= self.start + len(self.found.tokens)

    def num_right(self, tokens: list[int]) -> int:
        """Count the tokens with which the text went on as guessed."""
        pairs = zip(self.found.tokens, tokens[self.start :], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(slots=True)
class _Means:
    """Running means: accepted drafts of a round of the head, and of the tree's guesses the score and how many
    tokens were right."""

    head: float
    score: float = 1.0
    right: float = 1.0

    def take_head(self, accepted: int) -> None:
        self.head += NEWEST * (accepted - self.head)

    def take_guess(self, guess: _Guess, tokens: list[int]) -> None:
        self.score += NEWEST * (guess.found.score - self.score)
        self.right += NEWEST * (guess.num_right(tokens) - self.right)

    def prefer_tree(self, found: SuffixDraft) -> bool:
        """Tell whether the tree, which has its score as often as it had before, is expected to go further."""
        return found.score * self.right > self.head * self.score


@dataclass(slots=True)
class _Seen:
    """What is known of a request: rounds looked at, guesses that its text has not reached the end of, means."""

    means: _Means
    num_rounds: int = 0
    guesses: list[_Guess] = field(default_factory=list)


class HybridLookup:
    """Drafts on the host, where the tree is expected to go further than the head."""

    def __init__(self, texts: SuffixTexts, names: tuple[str, str], head_drafts: int) -> None:
        """`names`: of the tree and of the head, as the record has them; `head_drafts`: of each round."""
        self.part_names: tuple[str, str] | None = names
        self.num_on_device = head_drafts
        self._texts = texts
        self.restart()

    def restart(self) -> None:
        self._texts.restart()
        self._seen: dict[str, _Seen] = {}
        self._usual = _Means(self.num_on_device / 2)  # of all requests: what a new one is expected to have

    def draft(self, sequences: Iterable[Sequence]) -> list[list[int] | None]:
        return [self._draft(sequence) for sequence in sequences]

    def finish(self, sequence: Sequence) -> None:
        self._texts.finish(sequence)
        self._seen.pop(sequence.request.request_id, None)

    def _draft(self, sequence: Sequence) -> list[int] | None:
        seen = self._seen.setdefault(sequence.request.request_id, _Seen(replace(self._usual)))
        self._take_rounds(seen, sequence)
        found = self._texts.look_up(sequence)
        if found.tokens:
            seen.guesses.append(_Guess(len(sequence.tokens), found))
        return found.tokens if seen.means.prefer_tree(found) else None

    def _take_rounds(self, seen: _Seen, sequence: Sequence) -> None:
        """Take the rounds of a request that it has not looked at, and the guesses that they decide."""
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


class HybridDrafter:
    """Drafts on the device with the head, whose loop ends with the drafts that it is to make."""

    def __init__(self, head: Drafter[Any], names: tuple[str, str], head_drafts: int, sizes: SuffixSizes) -> None:
        """`head`: has room for as many drafts as the tree may offer."""
        assert head.num_draft_tokens == sizes.limits.most
        self.head = head
        self.num_draft_tokens = head.num_draft_tokens
        self._texts = SuffixTexts(sizes)
        lookup = HybridLookup(self._texts, names, head_drafts)
        self.requirements = replace(head.requirements, on_host=lookup)

    def admit(self, slot: int, request: Request) -> None:
        self._texts.admit(slot, request)
        self.head.admit(slot, request)

    def ingest(self, pack: PromptPack) -> Any:
        return self.head.ingest(pack)

    def catch_up(self, verified: VerifiedRound) -> Any:
        return self.head.catch_up(verified)

    def step(self, state: Any, step: DraftStep) -> None:
        self.head.step(state, step)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.head.kept_logits(slot_ids)
