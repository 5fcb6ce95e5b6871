"""Acceptance by draft position, counted round by round, and the acceptance length that follows from it.

The end of a text hides how many of a round's drafts would have been accepted. Leaving such rounds out gives too low a
result, because long rounds are more likely to reach the end (length bias). Counting the emitted tokens is also too low.
The rule's decisions on drafts after an end of sequence cannot be used, since neither target nor drafter was trained on
text there. So these drafts are censored, as in survival analysis (Kaplan and Meier 1958). A draft counts at its
position if it is in the text. The rate at a position is over the rounds that could be judged there.

A token limit hides nothing: the round was judged before it was cut, and counts as judged. Whether a round takes place
then depends only on the rounds before it, so the mean is unbiased (Wald 1944). docs/log/acceptance_length.md
compares the ways of counting.

A round that offers fewer than K drafts accepts none at later positions. It still counts in the unconditional rates. The
conditional rate at a position is over the drafts that were offered there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_lab.core.results import RequestRecord
    from spec_lab.record.models import Request


@dataclass(slots=True)
class DraftCounts:
    """Counts pooled over rounds, with an entry for each of K draft positions.

    Attributes:
        reached: number of rounds whose text continues to the position and whose earlier drafts were all accepted.
        offered: number of those that offered a draft there.
        accepted: number of those whose draft was accepted.
    """

    reached: list[int]
    offered: list[int]
    accepted: list[int]

    @classmethod
    def empty(cls, num_draft_tokens: int) -> DraftCounts:
        return cls([0] * num_draft_tokens, [0] * num_draft_tokens, [0] * num_draft_tokens)

    def add_round(self, num_accepted: int, num_judged: int, num_offered: int | None = None) -> None:
        """Count one round.

        Args:
            num_accepted: drafts that the rule accepted, before any cut.
            num_judged: tokens of the round that are in the text: `num_accepted` + 1, or fewer if the text ended.
            num_offered: drafts that could have been accepted; None means K.
        """
        most = len(self.reached)
        for position in range(min(num_judged, most)):
            self.reached[position] += 1
            self.offered[position] += num_offered is None or position < num_offered
        for position in range(min(num_accepted, num_judged)):
            self.accepted[position] += 1

    @property
    def conditional(self) -> list[float | None]:
        """Return for each position the accepted share of the drafts offered and reached there; None if there are
        none."""
        return [float(rate) if rate is not None else None for rate in _rates(self.accepted, self.offered)]

    @property
    def unconditional(self) -> list[float | None]:
        """Return for each position the estimated share of all rounds that accept the draft there. It is None if no
        round could be judged there, unless the rate at an earlier position is 0."""
        return [float(share) if share is not None else None for share in self._shares()]

    @property
    def acceptance_length(self) -> float | None:
        """Return tokens a round, including the correction or bonus token: 1 + the sum of the unconditional rates.

        If no text ended inside a round, this is judged tokens / rounds, to the last bit.
        """
        shares = self._shares()
        known = [share for share in shares if share is not None]
        return float(1 + sum(known)) if len(known) == len(shares) else None

    def _shares(self) -> list[Fraction | None]:
        """Return the products of the rates. After a position with rate 0 they are 0, even if nothing was judged
        there."""
        shares: list[Fraction | None] = []
        share: Fraction | None = Fraction(1)
        for rate in _rates(self.accepted, self.reached):
            if share:
                share = None if rate is None else share * rate
            shares.append(share)
        return shares


def draft_counts(requests: Iterable[RequestRecord | Request], num_draft_tokens: int) -> DraftCounts:
    """Return the drafts reached and accepted at each position, pooled over requests; those whose engine does not tell
    have none."""
    counts = DraftCounts.empty(num_draft_tokens)
    for request in requests:
        for accepted, judged, offered in rounds_of(request):
            counts.add_round(accepted, judged, offered)
    return counts


def rounds_of(request: RequestRecord | Request) -> Iterable[tuple[int, int, int | None]]:
    """Yield the accepted drafts, the judged tokens and the offered drafts of each round (`DraftCounts.add_round`).

    A histogram has no rounds that end inside a text, since the engine did not tell them.
    """
    accepted = request.accepted_per_round
    if accepted is None:
        for offered, count, times in getattr(request, "rounds_histogram", None) or ():
            yield from [(count, count + 1, offered)] * times
        return
    judged = request.judged_per_round or [count + 1 for count in accepted]
    yield from zip(accepted, judged, request.offered_per_round or repeat(None, len(accepted)), strict=True)


def acceptance_length(requests: Iterable[RequestRecord | Request], num_draft_tokens: int) -> float | None:
    """Return the acceptance length of some requests; None if too few drafts were judged."""
    return draft_counts(requests, num_draft_tokens).acceptance_length


@dataclass(frozen=True, slots=True)
class RoundTotals:
    """Counts of a whole pass, from an engine that does not tell them by request.

    Attributes:
        rounds: request rounds that offered a draft.
        accepted: drafts that were accepted in them, before any cut.
        by_position: rounds that accepted the draft at each position; None if the engine does not tell.
    """

    rounds: int
    accepted: int
    by_position: tuple[int, ...] | None = None

    @property
    def common_length(self) -> float | None:
        """Return the acceptance length that every engine can tell: 1 + accepted drafts / rounds that offered one."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def round_totals(requests: Iterable[RequestRecord | Request], num_draft_tokens: int) -> RoundTotals:
    """Pool the rounds that offered a draft, as they were judged: what any engine can count alike."""
    judged = [accepted for request in requests for accepted, _, offered in rounds_of(request) if offered != 0]
    by_position = tuple(sum(accepted > place for accepted in judged) for place in range(num_draft_tokens))
    return RoundTotals(len(judged), sum(judged), by_position)


def _rates(accepted: Iterable[int], before: Iterable[int]) -> list[Fraction | None]:
    return [Fraction(count, all_) if all_ else None for count, all_ in zip(accepted, before, strict=True)]
