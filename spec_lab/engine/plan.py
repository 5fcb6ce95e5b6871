"""How many drafts each launch verifies and makes: what a plan decides on the host, and what it sees."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.core.types import Request, Sequence

if TYPE_CHECKING:
    from spec_lab.engine.costs import CostTable


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What a round runs.

    Attributes:
        num_offered: the most waiting drafts that it verifies for a request.
        num_made: the drafts that it makes for the next round; 0 leaves out the drafter.
        is_full: every request has so many drafts to offer, so that none has to be left out.
    """

    num_offered: int
    num_made: int
    is_full: bool = False


OFF = LaunchShape(0, 0)
"""A round of plain decoding."""


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """What a plan chose for a launch. `num_tokens`: the tokens that it expects of all requests; None if it has no
    opinion."""

    shape: LaunchShape
    num_tokens: float | None = None


class Plan:
    """Chooses the shape of each launch. A subclass need not know of requests, nor learn.

    The choice may depend on everything that was known before the drafts of the launch were drawn, and on the drafter's
    confidence in them, but not on their tokens. So the output stays the target's.

    Attributes:
        resumes: whether a request may draft again after rounds without the drafter.
        needs_costs: whether `costs` has to be measured before the first choice.
        costs: how long each shape takes on this machine; None if that was not measured.
    """

    resumes: bool = False
    needs_costs: bool = False
    costs: CostTable | None = None

    def restart(self) -> None:
        """Drop what is known of requests, before a pass over a workload."""

    def admit(self, slot: int, request: Request) -> None:
        """Note that a request takes `slot`."""

    def choose(self, sequences: List[Sequence]) -> PlannedLaunch:
        """Choose for the next launch of `sequences`. The host's fields of a sequence say what its slot holds."""
        raise NotImplementedError

    def review(self, sequences: List[Sequence]) -> None:
        """Prepare for the next choices, while the device runs the launch of `sequences` that was chosen last."""

    def note(self, sequences: List[Sequence], shape: LaunchShape, seconds: float | None) -> None:
        """Learn from a round of `sequences` that has been accounted for: the last entry of their lists by round, and
        how long it took; None if that was not measured by itself."""


class GivenPlan(Plan):
    """drafter.plan=given: the largest K of the running requests, as their lines in the workload have it.

    Each offers at most its own; those that are off never draft again.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._most = num_draft_tokens

    def choose(self, sequences: List[Sequence]) -> PlannedLaunch:
        given = [sequence.request.num_draft_tokens for sequence in sequences]
        largest = max(self._most if own is None else own for own in given)
        return PlannedLaunch(LaunchShape(largest, largest) if largest else OFF)
