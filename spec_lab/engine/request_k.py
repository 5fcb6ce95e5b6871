"""K by request: set by the request's line in the workload, or derived from its running acceptance.

The host decides from rounds that it has accounted for. So a draft's own value never influences whether it is offered.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol

from spec_lab.core.types import Sequence
from spec_lab.engine.offered import DraftOffers

OFF = 0


class RequestK(Protocol):
    """Decides how many drafts a request may offer."""

    def k_of(self, sequence: Sequence) -> int:
        """Return the most drafts of its next round; `OFF` if it does not draft."""
        ...

    def restart(self) -> None:
        """Drop the state of all requests, before a pass over a workload."""
        ...


@dataclass(frozen=True, slots=True)
class GivenK:
    """The K that a request's line in the workload sets; `most` for requests that set none."""

    most: int

    def k_of(self, sequence: Sequence) -> int:
        given = sequence.request.num_draft_tokens
        return self.most if given is None else given

    def restart(self) -> None:
        """Do nothing: there is no state."""


@dataclass(slots=True)
class _Running:
    """The state of a request: the rounds seen, its running mean of accepted drafts, and its K."""

    num_rounds: int
    mean: float
    k: int


class RunningK:
    """Derives a request's K from its past: the running mean of its accepted drafts plus one, rounded, at most its
    given K.

    If the mean is below `off_below` after `WARM_UP` rounds, the request stops drafting.
    """

    WARM_UP = 8
    WEIGHT = 0.2

    def __init__(self, given: GivenK, off_below: float) -> None:
        """`off_below`: in accepted drafts for each round; with 0 no request stops."""
        self._given = given
        self._off_below = off_below
        self.restart()

    def restart(self) -> None:
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


class RequestLimits:
    """Sends the K of each slot's request to the device when it changes."""

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
