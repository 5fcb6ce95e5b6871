"""Counts the rounds that greedy speculation would take for a text, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_lab.record.draft_counts import DraftCounts


@dataclass(slots=True)
class RoundCounts:
    """Pooled counts over texts.

    A round at the end of its text, by an end of sequence or a limit, only counts up to that end. Whether its further
    drafts would have been accepted is unknown.
    """

    num_draft_tokens: int
    num_rounds: int = 0
    num_cut_rounds: int = 0
    drafts: DraftCounts = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = DraftCounts.empty(self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """The acceptance length, as in `spec_lab.record.draft_counts`; None if too few drafts were judged."""
        return self.drafts.acceptance_length

    @property
    def acceptance_rates(self) -> list[float | None]:
        """The share of rounds in which draft i is accepted, for each i."""
        return self.drafts.unconditional

    def walk(self, num_matches: Sequence[int], prompt_length: int, length: int) -> None:
        """Add the rounds of one text of `length` tokens, prompt included.

        `num_matches[p]`: how many leading drafts from position p agree with the text. Strict greedy speculation follows
        the text. With L tokens in the cache and token L pending, drafting starts from position L-1. If m drafts agree,
        m+1 tokens are emitted, and L grows by m+1.
        """
        committed = prompt_length
        while committed < length - 1:
            num_accepted, num_left = num_matches[committed - 1], length - 1 - committed
            self.drafts.add_round(num_accepted, min(num_accepted + 1, num_left))
            self.num_rounds += 1
            self.num_cut_rounds += num_accepted + 1 > num_left
            committed += num_accepted + 1

    def add(self, other: RoundCounts) -> None:
        """Pool another category's counts into these."""
        self.num_rounds += other.num_rounds
        self.num_cut_rounds += other.num_cut_rounds
        self.drafts.add(other.drafts)
