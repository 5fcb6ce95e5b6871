"""The rounds of an engine: one, or one for each shape that a launch may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

from spec_lab.core.types import Request, Sequence
from spec_lab.engine.host_drafts import HostDrafts
from spec_lab.engine.k_schedule import KSchedule
from spec_lab.engine.missed_rows import MissedRows
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.plan import OFF, Choice, Plan, Shape
from spec_lab.engine.request_k import RequestLimits
from spec_lab.engine.round import DecodeRound


class PlannedRounds:
    """The rounds that a plan chooses from: one for each shape, made when it is first chosen.

    It follows what each slot holds, so that a plan need not know which shapes can follow each other. Drafts can only be
    verified if the drafter has seen every round, and a ring that is full has to be emptied.
    """

    def __init__(
        self,
        plan: Plan,
        make: Callable[[Shape], DecodeRound],
        missed: MissedRows,
        offered: DraftOffers,
        num_draft_tokens: int,
        makes_all: bool = False,
        is_captured: bool = False,
    ) -> None:
        """Keep the parts.

        Args:
            makes_all: the drafter makes all K drafts if it makes any.
            is_captured: each shape is a graph, so that a round may have rows for more drafts than are waiting.
        """
        self.plan = plan
        self.missed = missed
        self._make = make
        self._offered = offered
        self._num_draft_tokens = num_draft_tokens
        self.makes_all = makes_all
        self._is_captured = is_captured
        self._rounds: dict[Shape, DecodeRound] = {}

    def of_shape(self, shape: Shape) -> DecodeRound:
        """Return the round of this shape."""
        if shape not in self._rounds:
            self._rounds[shape] = self._make(shape)
        return self._rounds[shape]

    def admit(self, slot: int, request: Request) -> None:
        """Note that a request takes `slot`."""
        own = request.num_draft_tokens
        self.missed.clear(slot)
        self._offered.limit([slot], [self._num_draft_tokens if own is None else own])
        self.plan.admit(slot, request)

    def choose(self, sequences: List[Sequence]) -> Choice:
        """Let the plan choose for `sequences`, and note what the launch will leave in their slots."""
        choice = self.plan.choose(sequences)
        shape = self.possible(choice.shape, max(sequence.num_missed for sequence in sequences))
        if shape.num_offered and not self._is_captured:
            waiting = [sequence.num_waiting for sequence in sequences]
            num_offered = min(shape.num_offered, max(waiting))
            is_full = all(s.request.num_draft_tokens is None for s in sequences) and num_offered <= min(waiting)
            shape = Shape(num_offered, shape.num_made, is_full)
        for sequence in sequences:
            sequence.num_waiting = shape.num_made
            sequence.num_missed = 0 if shape.num_made else sequence.num_missed + 1
            sequence.waiting_confidences = None
        return replace(choice, shape=shape)

    def possible(self, wanted: Shape, num_missed: int) -> Shape:
        """Return the shape nearest to `wanted` that can follow `num_missed` rounds without the drafter."""
        if wanted == OFF and num_missed + 1 < self.missed.size:
            return OFF
        num_made = self._num_draft_tokens if self.makes_all else max(wanted.num_made, 1)
        return Shape(0 if num_missed else wanted.num_offered, num_made)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of an engine, one for each K that a batch can have.

    `schedule`: K by the number of running requests; None if K does not depend on it. `narrower`: the other rounds by K,
    and possibly the widest. `host`: writes drafts of the host to the slots before a round; None if the host makes none.
    `limits`: sends the K of each request to the device; None if all have the same K. `plain`: the round for when no
    request drafts; None without `limits`. `planned`: those that a plan chooses from; None without a plan.
    """

    widest: DecodeRound
    schedule: KSchedule | None = None
    narrower: Mapping[int, DecodeRound] = field(default_factory=dict)
    host: HostDrafts | None = None
    limits: RequestLimits | None = None
    plain: DecodeRound | None = None
    planned: PlannedRounds | None = None

    def of_batch(self, num_requests: int) -> DecodeRound:
        """Return the round for this number of running requests."""
        if self.schedule is None:
            return self.widest
        return self.narrower.get(self.schedule.k_of(num_requests), self.widest)

    def of_requests(self, sequences: List[Sequence]) -> DecodeRound:
        """Return the round for `sequences`. If requests have a K of their own, first send it to the device."""
        if self.limits is not None and self.plain is not None and self.limits.tell(sequences) == 0:
            return self.plain
        return self.of_batch(len(sequences))

    def with_room_for(self, decode_round: DecodeRound, longest: int) -> DecodeRound:
        """Return the round of the device's own K if `longest` drafts of the host fit in it, else `decode_round`."""
        assert self.host is not None
        fewest = self.host.drafter.num_on_device
        fits = longest <= fewest < decode_round.num_draft_tokens
        return self.narrower.get(fewest, decode_round) if fits else decode_round

    def to_prepare(self, num_requests: int) -> list[DecodeRound]:
        """Return the rounds that may run for this number of requests."""
        usual = self.of_batch(num_requests)
        rounds = [usual] if self.host is None else [usual, self.with_room_for(usual, 0)]
        return [*rounds, *([] if self.plain is None else [self.plain])]
