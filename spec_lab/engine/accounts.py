"""The host accounts here for rounds behind their launch: tokens for the sequences, and a record a round.

In a captured mode only whether a request may have ended stands before the next launch; the rest is done when the device
is busy again. An eager round is told the lengths, so all of it stands before its launch.

Rounds that were launched together (`graph.rounds_per_replay`) are gone through as if they had come one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from spec_lab.core.origins import round_origins
from spec_lab.core.pruning_protocols import CatchupPruning
from spec_lab.core.results import RequestRecord, RoundRecord, RowCounts
from spec_lab.core.types import FinishReason, Sequence
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.parts import Parts
from spec_lab.engine.readback import PendingResult, RoundResult
from spec_lab.engine.scheduler import emit_round


@dataclass(slots=True)
class Launch:
    """What was launched at once, until its results are read: one round, or as many as the graph mode replays.

    `began_at`: from when on its time counts; `num_drafted`: drafts a request that a round made for the next, unless the
    device says it; `num_verified`: rows a request of a round's verify; `spans`: what its timer reads the stages' times
    from; `num_looked_up`: drafts that the host made for it; `catches_up`: the drafter was asked.
    """

    sequences: list[Sequence]
    began_at: float
    launch_seconds: float
    num_drafted: int
    num_verified: int
    result: PendingResult
    spans: Any
    num_looked_up: int = 0
    catches_up: bool = True


@dataclass(frozen=True, slots=True)
class _Read:
    """The results of what was launched, when the host had them, and the time they took."""

    launched: Launch
    result: RoundResult
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Times:
    """A round's share of the time of what was launched at once."""

    seconds: float
    launch_seconds: float
    stage_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Emitted:
    """What a round came to for the sequence at a place of its batch."""

    index: int
    num_offered: int
    num_kept: int
    truncated: bool


class RoundAccounts:
    """Adds up what the rounds of one `Engine.generate` call came to.

    Attributes:
        rounds: a record of each that ran for somebody.
        num_wasted_rounds: the others.
        read_at: when the host last had results, in seconds since the call began.
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
        self.read_at = 0.0
        self._unaccounted: list[_Read] = []

    def read(self, launched: Launch) -> bool:
        """Wait for the results of what was launched, and keep them until `catch_up`.

        Returns:
            Whether a request may have ended, with the tokens it asked for or at an end of sequence: no more than that
            decides about the next launch.
        """
        nearest_end = min(map(_tokens_to_end, launched.sequences))  # while the device is busy
        with self._parts.timer.reading():
            result = launched.result.read()
        now = self._now()
        self._unaccounted.append(_Read(launched, result, now, now - max(launched.began_at, self.read_at)))
        self.read_at = now
        num_rounds = self._graph.rounds_per_replay
        if num_rounds * max(result.num_emitted) < nearest_end and self._eos.isdisjoint(chain(*result.tokens)):
            return False
        num_rows = len(result.num_emitted) // num_rounds
        rows = zip(result.tokens, result.num_emitted, strict=True)
        emitted = [tokens[:count] for tokens, count in rows]
        return any(
            self._may_have_ended(sequence, emitted[index::num_rows])
            for index, sequence in enumerate(launched.sequences)
        )

    def catch_up(self) -> None:
        """Account for the tokens of all that was read, and make its records."""
        for read in self._unaccounted:
            self._settle(read)
        self._unaccounted.clear()

    def _may_have_ended(self, sequence: Sequence, emitted: list[list[int]]) -> bool:
        """Tell whether `sequence` has ended, or may have with what its rounds `emitted`."""
        request = sequence.request
        return (
            sequence.finish_reason is not None
            or sequence.num_output_tokens + sum(map(len, emitted)) >= request.max_new_tokens
            or not (request.ignore_eos or all(map(self._eos.isdisjoint, emitted)))
        )

    def _settle(self, read: _Read) -> None:
        """Account for the rounds of a launch; one that ran for nobody is only counted, and leaves its time to the
        others."""
        launched, num_launched = read.launched, self._graph.rounds_per_replay
        results = [result for result in read.result.split(num_launched) if any(result.num_emitted)]
        self.num_wasted_rounds += 0 if self._graph.skips_rounds else num_launched - len(results)
        if not results:
            self.rounds[-1].seconds += read.seconds  # a replay for nobody, which the round before it had brought about
        for result, stages in zip(results, self._stage_seconds(launched, len(results)), strict=True):
            self._record(
                launched,
                result,
                self._emit(launched, result, read.at),
                _Times(read.seconds / max(1, len(results)), launched.launch_seconds / max(1, len(results)), stages),
            )
        has_ended = [sequence.finish_reason is not None for sequence in launched.sequences]
        assert len(results) == num_launched or all(has_ended), "the device ended a request that goes on"

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
            confidences = None if result.confidences is None else result.confidences[index]
            emit_round(sequence, tokens, origins, self._eos, now, num_offered, num_imposed, confidences)
            emitted.append(_Emitted(index, num_offered, sequence.emitted_per_round[-1], sequence.truncated))
        return emitted

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
            distance=None if result.distance is None else [result.distance[part.index] for part in emitted],
            launch_seconds=times.launch_seconds,
            num_surplus=len(settled.sequences) - len(emitted),
        )
        self.rounds.append(record)

    def _rows(self, settled: Launch, result: RoundResult, emitted: list[_Emitted]) -> RowCounts:
        """Count drafts and rows of a round behind accept."""
        padded = self._graph.padded_size(len(settled.sequences))
        requirements = self._parts.drafter.requirements
        passes = requirements.rows_of_passes(result.num_rows) if settled.catches_up else ()
        live_lens = _live_lens(settled, result, emitted)
        live_lens += [1] * (padded - len(live_lens))
        computed = sum(self._catchup.num_computed(live_lens, rows) for rows in passes)
        if requirements.count_catchup is not None and settled.catches_up:
            computed = requirements.count_catchup(result.num_emitted, result.num_rows)
        count_drafts = self._drafts_of_chains if self._tree_rows is None else self._drafts_of_trees
        num_drafted, num_offered = count_drafts(settled, result, emitted, padded)
        return RowCounts(
            drafted=num_drafted,
            offered=num_offered,
            verified=padded * settled.num_verified,
            catchup_computed=computed,
            catchup_live=len(passes) * len(emitted),
        )

    def _drafts_of_chains(
        self, settled: Launch, result: RoundResult, emitted: list[_Emitted], padded: int
    ) -> tuple[int, int]:
        """Count drafts made and offered: draft steps are those of the whole batch."""
        num_drafted = settled.num_drafted if result.num_drafted is None else max(result.num_drafted)
        return padded * num_drafted + settled.num_looked_up, sum(part.num_offered for part in emitted)

    def _drafts_of_trees(
        self, settled: Launch, result: RoundResult, emitted: list[_Emitted], padded: int
    ) -> tuple[int, int]:
        """Count the rows that hold a draft, and those offered."""
        assert self._tree_rows is not None
        most, offered = self._tree_rows - 1, result.num_offered_rows
        return (
            padded * most if result.num_drafted is None else sum(result.num_drafted),
            sum(most if offered is None else offered[part.index] for part in emitted),
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


def _live_lens(settled: Launch, result: RoundResult, emitted: list[_Emitted]) -> list[int]:
    """Return L + n of each request of a round on the device, also of one that had ended; 1 where it was padding."""
    settled_here = {part.index for part in emitted}
    lens = []
    for index, sequence in enumerate(settled.sequences):
        num_emitted = result.num_emitted[index]
        surplus = 0 if index in settled_here else num_emitted
        lens.append(sequence.kv_len + surplus if num_emitted else 1)
    return lens


def _tokens_to_end(sequence: Sequence) -> int:
    """Count the tokens with which `sequence` has all that it asked for; 0 where it has ended."""
    return 0 if sequence.finish_reason is not None else sequence.request.max_new_tokens - sequence.num_output_tokens


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
    )
