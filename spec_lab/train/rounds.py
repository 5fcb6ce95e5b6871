"""This module holds what greedy speculation would have done with a text, counted round by round without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_lab.record.draft_counts import DraftCounts


@dataclass(slots=True)
class RoundCounts:
    """Pooled counts over texts.

    A round that runs into the end of its text, be it an end of sequence or a limit, counts as far as the text goes: how
    far its drafts would have held is unknown.
    """

    num_draft_tokens: int
    num_rounds: int = 0
    num_cut_rounds: int = 0
    drafts: DraftCounts = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = DraftCounts.empty(self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Counts as `spec_lab.record.acceptance_metrics`; None where too little was judged to know."""
        return self.drafts.acceptance_length

    @property
    def acceptance_rates(self) -> list[float | None]:
        """Share of the rounds in which draft i is accepted."""
        return self.drafts.unconditional

    def walk(self, num_matches: Sequence[int], prompt_length: int, length: int) -> None:
        """Add the rounds of one text of `length` tokens, prompt included.

        `num_matches[p]`: how many drafts, drafted from position p, agree with the text one after another. Strict greedy
        speculation follows the text: with L tokens in the cache and token L pending, the drafts start from position
        L-1, m of them agree, m+1 tokens are emitted, and L moves by as much.
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
