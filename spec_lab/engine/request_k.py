"""K by request: what its line of a workload asks for, or what follows from its own running acceptance.

The host decides, from rounds that it has read, so that no draft's own value has a say in whether it is offered.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol

from spec_lab.core.types import Sequence
from spec_lab.engine.offered import DraftOffers

OFF = 0


class RequestK(Protocol):
    """Says how many drafts a request may offer."""

    def k_of(self, sequence: Sequence) -> int:
        """Return the most drafts of its next round; `OFF` once it drafts no more."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a request that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class GivenK:
    """A request's K that its line says. `most` is K, which others have."""

    most: int

    def k_of(self, sequence: Sequence) -> int:
        given = sequence.request.num_draft_tokens
        return self.most if given is None else given

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: nothing is known."""


@dataclass(slots=True)
class _Running:
    """What is known of a request: rounds looked at, its mean of accepted drafts, and the K that follows."""

    num_rounds: int
    mean: float
    k: int


class RunningK:
    """A request's K from its past: one more than a running mean of a request's accepted drafts, rounded.

    Where the mean falls under `off_below` behind `WARM_UP` rounds, the request drafts no more.
    """

    WARM_UP = 8
    WEIGHT = 0.2

    def __init__(self, given: GivenK, off_below: float) -> None:
        """`off_below`: accepted drafts a round; 0 is never."""
        self._given = given
        self._off_below = off_below
        self._known: dict[str, _Running] = {}

    def k_of(self, sequence: Sequence) -> int:
        most = self._given.k_of(sequence)
        known = self._known.setdefault(sequence.request.request_id, _Running(0, float(most), most))
        for accepted in sequence.accepted_per_round[known.num_rounds :]:
            known.num_rounds += 1
            if known.k != OFF:
                known.mean += self.WEIGHT * (accepted - known.mean)
                known.k = min(most, int(known.mean + 1.5))
                if known.num_rounds >= self.WARM_UP and known.mean < self._off_below:
                    known.k = OFF
        return known.k

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence.request.request_id, None)


class RequestLimits:
    """Tells the device the K of each slot's request, where it has changed."""

    def __init__(self, policy: RequestK, offered: DraftOffers) -> None:
        self.policy = policy
        self._offered = offered
        self._told: dict[int, int] = {}

    def tell(self, sequences: List[Sequence]) -> int:
        """Set the limits of the slots of `sequences`, and return the largest."""
        limits = {sequence.slot: self.policy.k_of(sequence) for sequence in sequences}
        changed = {slot: k for slot, k in limits.items() if self._told.get(slot) != k}
        if changed:
            self._offered.limit(list(changed), list(changed.values()))
            self._told |= changed
        return max(limits.values())
