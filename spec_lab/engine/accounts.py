"""Accounts on the host for finished rounds: appends tokens to sequences, and makes a record for each round.

In a captured mode the accounting usually happens while the device runs the next round. Before that launch, the host
only checks whether the tokens that it read may have ended a request. With overlap it checks after the launch.

Without overlap, the accounting comes before the launch in three cases: a request may have ended, an eager round needs
the lengths, or a drafter on the host needs the tokens.

Rounds that were launched together (`graph.rounds_per_replay`) are accounted for one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from spec_lab.core.kept import Drop
from spec_lab.core.origins import round_origins
from spec_lab.core.results import RequestRecord, RoundRecord, RowCounts
from spec_lab.core.types import FinishReason, Sequence
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.parts import Parts
from spec_lab.engine.plan import LaunchShape, Plan
from spec_lab.engine.readback import PendingResult, RoundResult
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.scheduler import emit_round


@dataclass(slots=True)
class Launch:
    """A launch whose results have not been read yet: one round, or all rounds of one replay.

    Attributes:
        began_at: the time from which the launch is timed; if the host read earlier results after that, the time of
            that read counts instead.
        spans: what the timer needs to collect stage times.
        num_looked_up: drafts that the host made for the launch.
        num_tokens: the tokens that a plan expects of the launch; None without a plan.
    """

    sequences: list[Sequence]
    began_at: float
    launch_seconds: float
    round: DecodeRound
    result: PendingResult
    spans: Any
    num_looked_up: int = 0
    num_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """The results of a launch, when the host read them, and how long the launch took."""

    launched: Launch
    result: RoundResult
    at: float
    seconds: float


@dataclass(eq=False)
class RoundAccounts:
    """Collects the records of the rounds of one `Engine.generate` call.

    Attributes:
        rounds: a record of each round in which the device emitted a token, even if all its tokens are surplus.
        num_wasted_rounds: rounds that ran in a replay of several although the device had ended all their requests.
        read_at: when the host last read results, in seconds since the call began.
        overlap: the next round may be launched before the last is read.
        now: seconds since the call began.
        plan: learns from each round; None if nothing does.
    """

    parts: Parts
    graph: GraphMode
    catchup: Callable[[int], Drop]
    tree_rows: int | None
    overlap: bool
    now: Callable[[], float]
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self.rounds: list[RoundRecord] = []
        self.num_wasted_rounds = 0
        self.read_at = 0.0
        self._eos = self.parts.target.eos_token_ids
        self._unaccounted: list[_Read] = []

    def read(self, launched: Launch) -> bool:
        """Wait for the results of a launch, and keep them until `catch_up`.

        Returns:
            Whether a request may have ended, by its token limit, an end of sequence or a stop. A captured launch
            without drafts of the host needs to know nothing else.
        """
        nearest_end = min(  # while the device is busy; 0 if a request has ended
            0 if s.finish_reason is not None else s.request.max_new_tokens - s.num_output_tokens
            for s in launched.sequences
        )
        has_stops = any(sequence.request.has_stops for sequence in launched.sequences)
        with self.parts.timer.reading():
            result = launched.result.read()
        now = self.now()
        self._unaccounted.append(_Read(launched, result, now, now - max(launched.began_at, self.read_at)))
        self.read_at = now
        if result.made_confidences is not None and not self.overlap:  # else they are no longer the waiting drafts'
            for sequence, confidences in zip(launched.sequences, result.made_confidences, strict=False):
                sequence.waiting_confidences = confidences
        num_rounds = self.graph.rounds_per_replay
        is_within_limit = num_rounds * max(result.num_emitted) < nearest_end
        if is_within_limit and not has_stops and self._eos.isdisjoint(chain(*result.tokens)):
            return False
        num_rows = len(result.num_emitted) // num_rounds
        rows = zip(result.tokens, result.num_emitted, strict=True)
        emitted = [tokens[:count] for tokens, count in rows]
        return any(
            self._may_have_ended(sequence, emitted[index::num_rows])
            for index, sequence in enumerate(launched.sequences)
        )

    def catch_up(self) -> None:
        """Account for all launches that have been read."""
        for read in self._unaccounted:
            self._settle(read)
        self._unaccounted.clear()

    def _may_have_ended(self, sequence: Sequence, emitted: list[list[int]]) -> bool:
        """Return whether `sequence` has ended, or may have ended with the tokens that its rounds `emitted`."""
        request = sequence.request
        return (
            sequence.finish_reason is not None
            or sequence.num_output_tokens + sum(map(len, emitted)) >= request.max_new_tokens
            or not (request.ignore_eos or all(map(self._eos.isdisjoint, emitted)))
            or request.stops is not None
            or not all(map(request.stop_token_ids.isdisjoint, emitted))
        )

    def _settle(self, read: _Read) -> None:
        """Account for the rounds of a launch.

        Once all requests have ended, a further round of the launch is wasted. It is only counted, and its time goes to
        other rounds.
        """
        launched, num_launched = read.launched, self.graph.rounds_per_replay
        results = [result for result in read.result.split(num_launched) if any(result.num_emitted)]
        self.num_wasted_rounds += num_launched - len(results)
        if not results:
            self.rounds[-1].seconds += read.seconds  # a wasted replay counts as time of the last round
        for result, stages in zip(results, self._stage_seconds(launched, len(results)), strict=True):
            running = self._emit(launched, result, read.at)
            if self.plan is not None and running:
                shape = LaunchShape(launched.round.num_verified - 1, launched.round.num_drafted)
                seconds = None if self.overlap else read.seconds  # which would be those of a capture too
                self.plan.note([launched.sequences[index] for index in running], shape, seconds)
            self._record(read, result, running, len(results), stages)
        has_ended = [sequence.finish_reason is not None for sequence in launched.sequences]
        assert len(results) == num_launched or all(has_ended), "the device ended a request that goes on"

    def _emit(self, settled: Launch, result: RoundResult, now: float) -> list[int]:
        """Account for a round's tokens, and return the indices of the sequences that were still running.

        Tokens of a sequence that an earlier round finished are surplus and left out. The device may go on with one that
        a stop ended, which only the host sees.
        """
        running = [index for index, sequence in enumerate(settled.sequences) if sequence.finish_reason is None]
        num_emitting = sum(map(bool, result.num_emitted))
        may_be_behind = self.overlap and self.graph.rounds_per_replay == 1
        num_stopped = sum(sequence.finish_reason is FinishReason.STOP for sequence in settled.sequences)
        is_agreed = len(running) <= num_emitting <= len(running) + num_stopped
        assert may_be_behind or is_agreed, "host and device disagree on which requests had ended"
        for index in running:
            num_emitted = result.num_emitted[index]
            hits = None if result.relaxed is None else result.relaxed[index]
            num_offered = result.num_rows - 1 if result.num_offered is None else result.num_offered[index]
            origins = round_origins(num_emitted, num_offered, hits)
            num_imposed = num_emitted - 1 if self.parts.rule.traits.imposed else 0
            tokens = result.tokens[index][:num_emitted]
            sequence = settled.sequences[index]
            confidences = None if result.confidences is None else result.confidences[index]
            emit_round(
                sequence, tokens, origins, self._eos, now, num_offered, num_imposed=num_imposed, confidences=confidences
            )
            if self.plan is not None and self.tree_rows is not None:
                path = [] if result.path is None else result.path[index][1:num_emitted]
                sequence.tree_per_round.append((settled.round.num_verified, path))
        return running

    def _record(
        self, read: _Read, result: RoundResult, running: list[int], num_rounds: int, stages: dict[str, float]
    ) -> None:
        """Make the record of one of the `num_rounds` of a launch. It leaves out requests that had ended before."""
        settled, sequences = read.launched, [read.launched.sequences[index] for index in running]
        record = RoundRecord(
            index=len(self.rounds),
            request_ids=[sequence.request.request_id for sequence in sequences],
            accepted=[result.num_emitted[index] - 1 for index in running],
            emitted=[sequence.emitted_per_round[-1] for sequence in sequences],
            truncated=[sequence.truncated for sequence in sequences],
            seconds=read.seconds / num_rounds,
            stage_seconds=stages,
            rows=self._rows(settled, result, sequences),
            relaxed=None if result.relaxed is None else [sum(result.relaxed[index]) for index in running],
            distance=None if result.distance is None else [result.distance[index] for index in running],
            launch_seconds=settled.launch_seconds / num_rounds,
            num_surplus=len(settled.sequences) - len(running),
            num_expected=settled.num_tokens,
        )
        self.rounds.append(record)

    def _rows(self, settled: Launch, result: RoundResult, sequences: list[Sequence]) -> RowCounts:
        """Count the drafts and rows of a round, once acceptance is known."""
        padded = self.graph.padded_size(len(settled.sequences))
        drafter: Any = self.parts.drafter
        requirements = drafter.requirements
        num_rows = result.num_rows if settled.round.num_catchup_rows is None else settled.round.num_catchup_rows
        passes = requirements.rows_of_passes(num_rows) if num_rows else ()
        drop = self.catchup(padded)
        attending = sum(padded if drop is Drop.BEFORE_ATTENTION else padded * rows for rows in passes)
        going_on = sum(padded if drop.is_inside else padded * rows for rows in passes)
        if requirements.counts_catchup and num_rows:
            attending = going_on = drafter.count_catchup(result.num_emitted, num_rows)
        # A draft step runs for the whole batch, padding included; of a tree all rows but the root hold a draft.
        if self.tree_rows is None:
            num_drafted = padded * settled.round.num_drafted + settled.num_looked_up
            num_offered = sum(sequence.offered_per_round[-1] for sequence in sequences)
        else:
            num_drafted = padded * (self.tree_rows - 1) if settled.round.num_drafted else 0
            num_offered = len(sequences) * (settled.round.num_verified - 1)
        return RowCounts(
            drafted=num_drafted,
            offered=num_offered,
            verified=padded * settled.round.num_verified,
            catchup_attention=attending,
            catchup_output=going_on,
            catchup_mlp=going_on,
            catchup_live=len(passes) * len(sequences),
        )

    def _stage_seconds(self, settled: Launch, num_rounds: int) -> list[dict[str, float]]:
        """Return the times of the stages that exist: without drafts there is no `catchup`, with one draft no `recur`.

        With overlap no times are returned: a later replay of the same graph may have overwritten the events.
        """
        if self.overlap:
            return [{} for _ in range(num_rounds)]
        num_draft_tokens = self.parts.drafter.num_draft_tokens
        absent = {"catchup"} if num_draft_tokens == 0 else set()
        absent |= {"recur"} if num_draft_tokens <= 1 else set()
        return [
            {name: seconds for name, seconds in stages.items() if name not in absent}
            for stages in self.parts.timer.collect(settled.spans, num_rounds)
        ]


def request_record(sequence: Sequence, finish_reason: FinishReason) -> RequestRecord:
    """Return the record of a sequence that has ended."""
    request = sequence.request
    return RequestRecord(
        request_id=request.request_id,
        category=request.category,
        prompt_ids=list(request.prompt_ids),
        output_ids=sequence.tokens[len(request.prompt_ids) :],
        token_origins=sequence.origins,
        answer=request.answer,
        offered_per_round=sequence.offered_per_round,
        accepted_per_round=sequence.accepted_per_round,
        judged_per_round=sequence.judged_per_round,
        emitted_per_round=sequence.emitted_per_round,
        truncated=sequence.truncated,
        finish_reason=finish_reason,
        max_new_tokens=request.max_new_tokens,
        admitted_at=sequence.admitted_at,
        emitted_at=sequence.emitted_at,
        confidence_per_round=sequence.confidence_per_round,
        drafted_by=sequence.drafted_by,
        arrived_at=sequence.arrived_at,
        turn=request.turn,
    )
