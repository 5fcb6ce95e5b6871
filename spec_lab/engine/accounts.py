"""The host accounts here for rounds behind their launch: tokens for the sequences, and a record a round.

Tokens decide who goes on, so they come before the next launch; records are made when the device is busy again.

Rounds that were launched together (`graph.rounds_per_replay`) are gone through as if they had come one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from spec_lab.core.origins import round_origins
from spec_lab.core.pruning_protocols import CatchupPruning
from spec_lab.core.results import RequestRecord, RoundRecord, RowCounts
from spec_lab.core.types import FinishReason, Sequence
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.readback import PendingResult, RoundResult
from spec_lab.engine.round import Parts
from spec_lab.engine.scheduler import emit_round


@dataclass(slots=True)
class Launch:
    """Holds what was launched at once until its results are read: one round, or as many as the graph mode replays.

    `num_drafted`: drafts a request that a round made for the next, unless the device says it; `spans`: what its timer
    reads the times of stages from.
    """

    sequences: list[Sequence]
    launched_at: float
    launch_seconds: float
    num_drafted: int
    result: PendingResult
    spans: Any


@dataclass(frozen=True, slots=True)
class _Times:
    """Holds a round's share of the time of what was launched at once."""

    seconds: float
    launch_seconds: float
    stage_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Emitted:
    """Holds what a round came to for the sequence at a place of its batch."""

    index: int
    num_offered: int
    num_kept: int
    truncated: bool


class RoundAccounts:
    """Keeps what the rounds of one `Engine.generate` call came to.

    Attributes:
        rounds: a record of each that ran for somebody.
        num_wasted_rounds: the others.
    """

    def __init__(
        self,
        parts: Parts,
        graph: GraphMode,
        catchup: CatchupPruning,
        tree_rows: int | None,
        overlap: bool,
        now: Callable[[], float],
    ) -> None:
        """`overlap`: the next round is launched before the last is read; `now`: seconds since the call began."""
        self.rounds: list[RoundRecord] = []
        self.num_wasted_rounds = 0
        self._parts = parts
        self._graph = graph
        self._catchup = catchup
        self._tree_rows = tree_rows
        self._overlap = overlap
        self._now = now
        self._eos = parts.target.eos_token_ids
        self._accepts_unseen = parts.rule.traits.imposed
        self._settled_at = 0.0
        self._unrecorded: list[Callable[[], None]] = []

    def settle(self, settled: Launch) -> None:
        """Account for the tokens of the rounds that were launched; one that ran for nobody is only counted, and leaves
        its time to the others. `record` does the rest."""
        num_launched = self._graph.rounds_per_replay
        with self._parts.timer.reading():
            results = settled.result.read().split(num_launched)
        now = self._now()
        results = [result for result in results if any(result.num_emitted)]
        self.num_wasted_rounds += 0 if self._graph.skips_rounds else num_launched - len(results)
        seconds = now - max(settled.launched_at, self._settled_at)
        self._settled_at = now
        emitted = [self._emit(settled, result, now) for result in results]
        if not results:
            self._unrecorded.append(partial(self._prolong, seconds))
        else:
            self._unrecorded.append(partial(self._record_all, settled, results, emitted, seconds))
        has_ended = [sequence.finish_reason is not None for sequence in settled.sequences]
        assert len(results) == num_launched or all(has_ended), "the device ended a request that goes on"

    def record(self) -> None:
        """Make the records of the rounds settled since this was called last."""
        for make in self._unrecorded:
            make()
        self._unrecorded.clear()

    def _prolong(self, seconds: float) -> None:
        """Leave the time of a replay that ran for nobody to the round before it."""
        self.rounds[-1].seconds += seconds

    def _emit(self, settled: Launch, result: RoundResult, now: float) -> list[_Emitted]:
        """Account for a round's tokens; those for a sequence that an earlier round finished are surplus, and nothing is
        returned of them."""
        emitted = []
        running = [index for index, sequence in enumerate(settled.sequences) if sequence.finish_reason is None]
        num_emitting = sum(map(bool, result.num_emitted))
        may_be_behind = self._overlap and self._graph.rounds_per_replay == 1
        assert may_be_behind or num_emitting == len(running), "the device went on with a request that had ended"
        for index in running:
            num_emitted = result.num_emitted[index]
            hits = None if result.relaxed is None else result.relaxed[index]
            num_offered = result.num_rows - 1 if result.num_offered is None else result.num_offered[index]
            origins = round_origins(num_emitted, num_offered, hits)
            num_imposed = num_emitted - 1 if self._accepts_unseen else 0
            tokens = result.tokens[index][:num_emitted]
            sequence = settled.sequences[index]
            emit_round(sequence, tokens, origins, self._eos, now, num_offered, num_imposed)
            emitted.append(_Emitted(index, num_offered, sequence.emitted_per_round[-1], sequence.truncated))
        return emitted

    def _record_all(
        self, settled: Launch, results: list[RoundResult], emitted: list[list[_Emitted]], seconds: float
    ) -> None:
        """Keep what the rounds of a launch came to, with an equal share of its time each."""
        count = len(results)
        stages = self._stage_seconds(settled, count)
        for result, kept, stage_seconds in zip(results, emitted, stages, strict=True):
            self._record(settled, result, kept, _Times(seconds / count, settled.launch_seconds / count, stage_seconds))

    def _record(self, settled: Launch, result: RoundResult, emitted: list[_Emitted], times: _Times) -> None:
        """Keep what a round came to for those it did not run for in vain."""
        record = RoundRecord(
            index=len(self.rounds),
            request_ids=[settled.sequences[part.index].request.request_id for part in emitted],
            accepted=[result.num_emitted[part.index] - 1 for part in emitted],
            emitted=[part.num_kept for part in emitted],
            truncated=[part.truncated for part in emitted],
            seconds=times.seconds,
            stage_seconds=times.stage_seconds,
            rows=self._rows(settled, result, emitted),
            relaxed=None if result.relaxed is None else [sum(result.relaxed[part.index]) for part in emitted],
            launch_seconds=times.launch_seconds,
            num_surplus=len(settled.sequences) - len(emitted),
        )
        self.rounds.append(record)

    def _rows(self, settled: Launch, result: RoundResult, emitted: list[_Emitted]) -> RowCounts:
        """Count drafts and rows of a round behind accept."""
        num_rows, tree_rows = result.num_rows, self._tree_rows
        num_drafted = settled.num_drafted if result.num_drafted is None else max(result.num_drafted)
        padded = self._graph.padded_size(len(settled.sequences))
        passes = self._parts.drafter.requirements.rows_of_passes(num_rows)
        num_computed = self._catchup.num_computed
        return RowCounts(
            drafted=padded * (num_drafted if tree_rows is None else tree_rows - 1),
            offered=sum(part.num_offered for part in emitted) if tree_rows is None else len(emitted) * (tree_rows - 1),
            verified=padded * (num_rows if tree_rows is None else tree_rows),
            catchup_computed=sum(num_computed(padded, rows) for rows in passes),
            catchup_live=len(passes) * len(emitted),
        )

    def _stage_seconds(self, settled: Launch, num_rounds: int) -> list[dict[str, float]]:
        """Keep the stages that exist: without drafts there is nothing to catch up, with one draft nothing recurs.

        Nothing is kept with overlap: the next round has recorded over this one's events.
        """
        if self._overlap:
            return [{} for _ in range(num_rounds)]
        num_draft_tokens = self._parts.drafter.num_draft_tokens
        absent = {"catchup"} if num_draft_tokens == 0 else set()
        absent |= {"recur"} if num_draft_tokens <= 1 else set()
        return [
            {name: seconds for name, seconds in stages.items() if name not in absent}
            for stages in self._parts.timer.collect(settled.spans, num_rounds)
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
    )
