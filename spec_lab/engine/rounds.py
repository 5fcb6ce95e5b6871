"""The rounds of an engine: one for each shape that a launch may have, made when it is first chosen."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

from spec_lab.core.types import Request, Sequence
from spec_lab.engine.host_drafts import HostDrafts
from spec_lab.engine.missed_rows import MissedRows
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.plan import OFF, LaunchShape, Plan, PlannedLaunch
from spec_lab.engine.round import DecodeRound


@dataclass(slots=True)
class Rounds:
    """Makes rounds, and follows what each slot holds, so that a plan need not know which shapes can follow each other.

    Drafts can only be verified if the drafter has seen every round, and a ring that is full has to be emptied.

    Attributes:
        make: makes the round of a shape.
        most: the largest shape, which every launch has without a plan.
        plan: chooses shapes; None if all launches have the same.
        missed: the rings of rounds that the drafter missed; None if it never resumes.
        offered: counts the drafts of slots; None if every draft is offered.
        host: writes drafts of the host to the slots before a round; None if the host makes none.
        makes_all: the drafter makes all its drafts if it makes any.
        is_captured: each shape is a graph, so that a round may have rows for more drafts than are waiting.
    """

    make: Callable[[LaunchShape], DecodeRound]
    most: LaunchShape
    plan: Plan | None = None
    missed: MissedRows | None = None
    offered: DraftOffers | None = None
    host: HostDrafts | None = None
    makes_all: bool = False
    is_captured: bool = False
    _made: dict[LaunchShape, DecodeRound] = field(default_factory=dict)

    @property
    def widest(self) -> DecodeRound:
        """Return the round of the largest shape."""
        return self.of_shape(self.most)

    def of_shape(self, shape: LaunchShape) -> DecodeRound:
        """Return the round of this shape."""
        if shape not in self._made:
            self._made[shape] = self.make(shape)
        return self._made[shape]

    def admit(self, slot: int, request: Request) -> None:
        """Note that a request takes `slot`."""
        if self.plan is None:
            return
        if self.missed is not None:
            self.missed.clear(slot)
        if self.offered is not None:
            own = request.num_draft_tokens
            self.offered.limits[slot] = self.most.num_offered if own is None else own
        self.plan.admit(slot, request)

    def choose(self, sequences: List[Sequence]) -> PlannedLaunch:
        """Choose the shape of the next launch of `sequences`, and note what it will leave in their slots."""
        if self.plan is None:
            return PlannedLaunch(self.most)
        choice = self.plan.choose(sequences)
        shape = self.possible(choice.shape, max(sequence.num_missed for sequence in sequences))
        if shape.num_offered and not self.is_captured and self.host is None:
            waiting = [sequence.num_waiting for sequence in sequences]
            num_offered = min(shape.num_offered, max(waiting))
            is_full = all(s.request.num_draft_tokens is None for s in sequences) and num_offered <= min(waiting)
            shape = LaunchShape(num_offered, shape.num_made, is_full)
        for sequence in sequences:
            sequence.num_waiting = shape.num_made
            sequence.num_missed = 0 if shape.num_made or self.missed is None else sequence.num_missed + 1
            sequence.waiting_confidences = None
        return replace(choice, shape=shape)

    def review(self, sequences: List[Sequence]) -> None:
        """Let the plan prepare its next choices, while the device runs a launch of `sequences`."""
        if self.plan is not None:
            self.plan.review(sequences)

    def possible(self, wanted: LaunchShape, num_missed: int) -> LaunchShape:
        """Return the shape nearest to `wanted` that can follow `num_missed` rounds without the drafter."""
        if wanted == OFF and (self.missed is None or num_missed + 1 < self.missed.size):
            return OFF
        num_made = self.most.num_made if self.makes_all else max(wanted.num_made, 1)
        return LaunchShape(0 if num_missed else wanted.num_offered, min(num_made, self.most.num_made))

    def with_room_for(self, shape: LaunchShape, longest: int) -> LaunchShape:
        """Return `shape` without rows that neither the `longest` drafts of the host nor the device's own need."""
        needed = max(longest, self.most.num_made)
        if self.is_captured and needed > self.most.num_made:
            return shape  # a graph for each number of drafts would be many
        return replace(shape, num_offered=min(shape.num_offered, needed))

    def to_prepare(self, shape: LaunchShape) -> list[DecodeRound]:
        """Return the rounds of which a launch with this choice may run one."""
        shapes = [shape] if self.host is None else [shape, self.with_room_for(shape, 0)]
        return [self.of_shape(each) for each in dict.fromkeys(shapes)]
