"""drafter.plan=given: the K of each request's line in the workload."""

from __future__ import annotations

from collections.abc import Sequence as List

from spec_lab.core.types import Request, Sequence
from spec_lab.engine.costs import CostTable
from spec_lab.engine.plan import OFF, LaunchShape, PlannedLaunch


class GivenPlan:
    """The largest K of the running requests. Each offers at most its own; those that are off never draft again."""

    needs_costs = False
    resumes = False
    costs: CostTable | None = None

    def __init__(self, num_draft_tokens: int) -> None:
        self._most = num_draft_tokens

    def restart(self) -> None:
        """Do nothing: there is no state."""

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: there is no state."""

    def choose(self, sequences: List[Sequence]) -> PlannedLaunch:
        given = [sequence.request.num_draft_tokens for sequence in sequences]
        largest = max(self._most if own is None else own for own in given)
        return PlannedLaunch(LaunchShape(largest, largest) if largest else OFF)

    def note(self, sequences: List[Sequence]) -> None:
        """Do nothing: there is no state."""
