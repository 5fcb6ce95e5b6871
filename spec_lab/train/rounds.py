"""What greedy speculation would have done with a text, counted round by round without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RoundCounts:
    """Pooled counts over texts.

    Rounds cut short by the end of the text are kept apart: how far their drafts would have held is unknown.
    """

    num_draft_tokens: int
    num_rounds: int = 0
    num_emitted: int = 0
    num_truncated_rounds: int = 0
    accepted_at: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.accepted_at = [0] * self.num_draft_tokens

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a round, the bonus or correction token included; None without a whole round."""
        return self.num_emitted / self.num_rounds if self.num_rounds else None

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of the rounds in which draft i was accepted."""
        return [accepted / max(1, self.num_rounds) for accepted in self.accepted_at]

    def walk(self, num_matches: Sequence[int], prompt_length: int, length: int) -> None:
        """Adds the rounds of one text of `length` tokens, prompt included.

        `num_matches[p]`: how many drafts, drafted from position p, agree with the text one after another. Strict greedy
        speculation follows the text: with L tokens in the cache and token L pending, the drafts start from position
        L-1, m of them agree, m+1 tokens are emitted, and L moves by as much.
        """
        committed = prompt_length
        while committed < length - 1:
            num_accepted = num_matches[committed - 1]
            if committed + num_accepted + 1 > length - 1:
                self.num_truncated_rounds += 1
                return
            self.num_rounds += 1
            self.num_emitted += num_accepted + 1
            for position in range(num_accepted):
                self.accepted_at[position] += 1
            committed += num_accepted + 1

    def add(self, other: RoundCounts) -> None:
        """Pools another category's counts into these."""
        self.num_rounds += other.num_rounds
        self.num_emitted += other.num_emitted
        self.num_truncated_rounds += other.num_truncated_rounds
        self.accepted_at = [mine + theirs for mine, theirs in zip(self.accepted_at, other.accepted_at, strict=True)]
