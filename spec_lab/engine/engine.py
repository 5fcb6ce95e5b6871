"""The engine admits requests, runs prompt passes and rounds, and records what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from spec_lab.core.origins import round_origins
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.results import GenerationResult, PrefillRecord, RequestRecord, RoundRecord, RowCounts
from spec_lab.core.types import Request, Sequence
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.prefill import PromptPass
from spec_lab.engine.readback import PendingResult, RoundResult, read_later, read_now
from spec_lab.engine.round import DecodeRound, Parts
from spec_lab.engine.scheduler import Scheduler, emit_first, emit_round


@dataclass(slots=True)
class _Prefilling:
    """Counts what the prompt pass of one request has come to so far."""

    num_chunks: int = 0
    seconds: float = 0.0
    rows: RowCounts = field(default_factory=RowCounts)


class Engine:
    """Generates for batches of requests. One engine owns its caches; targets and heads can be shared."""

    def __init__(
        self,
        parts: Parts,
        prune: PrunePolicy,
        graph: GraphMode,
        scheduler: Scheduler,
        prefill_chunk: int,
        prefill_tokens: int | None = None,
        overlap: bool = False,
        make_round: Callable[[Any], DecodeRound] = DecodeRound,
    ) -> None:
        """`prefill_tokens`: the most rows of several prompts in a forward; None is one prompt at a time. `overlap`: the
        host reads a round's results only after it has launched the next; `make_round` takes `parts` and makes the
        round, of a chain or of a tree."""
        self.parts = parts
        self.graph = graph
        self.prune = prune
        self.scheduler = scheduler
        self.overlap = overlap
        self.round = make_round(parts)
        self.prompt_pass = PromptPass(self.round, prune, prefill_chunk, prefill_tokens)

    @property
    def num_draft_tokens(self) -> int:
        return self.parts.drafter.num_draft_tokens

    def prepare(self) -> None:
        """Capture what rounds of any size will replay, so that no timed pass has to."""
        with torch.inference_mode():
            for num_requests in range(1, self.scheduler.num_slots + 1):
                self.graph.prepare(self.round.of_batch(num_requests), num_requests)

    def generate(
        self, requests: Iterable[Request], on_finish: Callable[[RequestRecord], None] | None = None
    ) -> GenerationResult:
        """Run all `requests` to their end; records come back in the order of submission."""
        requests = list(requests)
        self.scheduler.submit(requests)
        run = _GenerationRun(self, on_finish)
        self.parts.experts_read.restart()
        with torch.inference_mode():
            try:
                while self.scheduler.has_work:
                    run.step()
            finally:
                for sequence in self.scheduler.running:
                    self.parts.slots.clear(sequence.slot)
                self.scheduler.abort()
        return run.result(requests)


@dataclass(slots=True)
class _Launch:
    """Holds what was launched at once until its results are read: one round, or as many as the graph mode replays.

    `num_drafted`: drafts a request that a round made for the next.
    """

    sequences: list[Sequence]
    launched_at: float
    launch_seconds: float
    num_drafted: int
    result: PendingResult


@dataclass(frozen=True, slots=True)
class _Times:
    """Holds a round's share of the time of what was launched at once."""

    seconds: float
    launch_seconds: float
    stage_seconds: dict[str, float]


class _GenerationRun:
    """Keeps the state of one `Engine.generate` call."""

    def __init__(self, engine: Engine, on_finish: Callable[[RequestRecord], None] | None) -> None:
        self._engine = engine
        self._on_finish = on_finish
        self._eos = engine.parts.target.eos_token_ids
        self._accepts_unseen = engine.parts.rule.traits.imposed
        self._start = perf_counter()
        self._prefilling: dict[str, _Prefilling] = {}
        self._requests: dict[str, RequestRecord] = {}
        self._rounds: list[RoundRecord] = []
        self._prefills: list[PrefillRecord] = []
        self._num_wasted_rounds = 0
        self._in_flight: _Launch | None = None
        self._num_prompt_forwards = 0
        self._settled_at = 0.0

    def step(self) -> None:
        """Admit, run one chunk of each unfinished prompt (as many together as fit a forward), then one round of
        everything that is ready.

        With overlap the host reads the round before only after the next one is launched; but before a prompt pass,
        which waits for the device anyway, it reads what is in flight, so that no round's time holds a prompt's.
        """
        scheduler = self._engine.scheduler
        for sequence in scheduler.admit(self._now()):
            self._admit(sequence)
        assert scheduler.running, "what submit let in fits an empty engine"
        prefilling = [s for s in scheduler.running if s.is_prefilling]
        if prefilling and self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            self._settle(in_flight)
        for pack in self._engine.prompt_pass.packs(prefilling):
            self._prefill(pack)
        ready = [s for s in scheduler.running if not s.is_prefilling and s.finish_reason is None]
        launched = self._launch(ready) if ready else None
        if self._engine.overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._settle(launched)

    def result(self, requests: list[Request]) -> GenerationResult:
        counts = self._engine.graph.counts
        return GenerationResult(
            requests=[self._requests[request.request_id] for request in requests],
            rounds=self._rounds,
            prefills=self._prefills,
            num_prompt_forwards=self._num_prompt_forwards,
            graph=replace(counts, nodes=dict(counts.nodes)),
            num_draft_tokens=self._engine.num_draft_tokens,
            seconds=self._now(),
            tree_rows=self._engine.round.tree_rows,
            experts_read=self._engine.parts.experts_read.read(),
            num_wasted_rounds=self._num_wasted_rounds,
        )

    def _now(self) -> float:
        return perf_counter() - self._start

    def _admit(self, sequence: Sequence) -> None:
        parts = self._engine.parts
        parts.slots.clear(sequence.slot)
        parts.slots.table.assign(sequence.slot, sequence.pages)
        parts.rule.admit(sequence.slot, sequence.request)
        parts.drafter.admit(sequence.slot, sequence.request)
        self._engine.graph.admit(sequence.slot, sequence.request)
        self._prefilling[sequence.request.request_id] = _Prefilling()

    def _prefill(self, pack: list[Sequence]) -> None:
        """Run a chunk of each of `pack` in one forward, whose time is shared out by their rows."""
        before = [sequence.num_prefilled for sequence in pack]
        start = perf_counter()
        rows = self._engine.prompt_pass.run(pack)
        seconds = perf_counter() - start
        self._num_prompt_forwards += 1
        num_rows = [sequence.num_prefilled - first for sequence, first in zip(pack, before, strict=True)]
        for sequence, count in zip(pack, num_rows, strict=True):
            progress = self._prefilling[sequence.request.request_id]
            progress.seconds += seconds * count / sum(num_rows)
            progress.num_chunks += 1
            progress.rows.add(rows[sequence.slot])
            if not sequence.is_prefilling:
                self._begin_decoding(sequence)

    def _begin_decoding(self, sequence: Sequence) -> None:
        request = sequence.request
        done = self._prefilling.pop(request.request_id)
        prompt_len = len(request.prompt_ids)
        self._prefills.append(PrefillRecord(request.request_id, prompt_len, done.num_chunks, done.seconds, done.rows))
        emit_first(sequence, self._eos, self._now())
        self._retire_if_finished(sequence)

    def _launch(self, ready: list[Sequence]) -> _Launch:
        engine, parts = self._engine, self._engine.parts
        decode_round = engine.round.of_batch(len(ready))
        engine.graph.prepare(decode_round, len(ready))
        launched_at = self._now()
        with parts.timer.round(engine.graph.rounds_per_replay):
            verification = engine.graph.run(decode_round, [s.slot for s in ready], max(s.kv_len for s in ready))
            with parts.timer.span("readback"):
                result = read_later(verification) if engine.overlap else read_now(verification)
        return _Launch(ready, launched_at, self._now() - launched_at, decode_round.num_drafted, result)

    def _settle(self, settled: _Launch) -> None:
        """Account for the rounds that were launched; one that ran for nobody is only counted, and leaves its time to
        the others."""
        num_launched = self._engine.graph.rounds_per_replay
        with self._engine.parts.timer.span("readback"):
            results = settled.result.read().split(num_launched)
        now = self._now()
        results = [result for result in results if any(result.num_emitted)]
        self._num_wasted_rounds += num_launched - len(results)
        seconds = now - max(settled.launched_at, self._settled_at)
        self._settled_at = now
        for result, stage_seconds in zip(results, self._stage_seconds(len(results)), strict=True):
            running = self._emit(settled, result, now)
            relaxed = None if result.relaxed is None else [sum(result.relaxed[index]) for index in running]
            sequences = [settled.sequences[index] for index in running]
            times = _Times(seconds / len(results), settled.launch_seconds / len(results), stage_seconds)
            self._record(settled, result.num_rows, sequences, times, relaxed)
        has_ended = [sequence.finish_reason is not None for sequence in settled.sequences]
        assert len(results) == num_launched or all(has_ended), "the device ended a request that goes on"
        for sequence in settled.sequences:
            self._retire_if_finished(sequence)

    def _emit(self, settled: _Launch, result: RoundResult, now: float) -> list[int]:
        """Account for a round's tokens; those for a sequence that an earlier round finished are surplus.

        Returns:
            The places of the other sequences in the batch, behind which padded rows stand.
        """
        running = [index for index, sequence in enumerate(settled.sequences) if sequence.finish_reason is None]
        num_emitting = sum(map(bool, result.num_emitted))
        assert self._engine.overlap or num_emitting == len(running), "the device went on with a request that had ended"
        for index in running:
            num_emitted = result.num_emitted[index]
            hits = None if result.relaxed is None else result.relaxed[index]
            num_offered = result.num_rows - 1 if result.num_offered is None else result.num_offered[index]
            origins = round_origins(num_emitted, num_offered, hits)
            num_imposed = num_emitted - 1 if self._accepts_unseen else 0
            tokens = result.tokens[index][:num_emitted]
            emit_round(settled.sequences[index], tokens, origins, self._eos, now, num_offered, num_imposed)
        return running

    def _record(
        self, settled: _Launch, num_rows: int, ready: list[Sequence], times: _Times, relaxed: list[int] | None
    ) -> None:
        """Keep what a round of `num_rows` rows a request came to for the `ready` sequences, those it did not run for in
        vain."""
        record = RoundRecord(
            index=len(self._rounds),
            request_ids=[s.request.request_id for s in ready],
            accepted=[s.accepted_per_round[-1] for s in ready],
            emitted=[s.emitted_per_round[-1] for s in ready],
            truncated=[s.truncated for s in ready],
            seconds=times.seconds,
            stage_seconds=times.stage_seconds,
            rows=self._rows(settled, num_rows, ready),
            relaxed=relaxed,
            launch_seconds=times.launch_seconds,
            num_surplus=len(settled.sequences) - len(ready),
        )
        self._rounds.append(record)

    def _rows(self, settled: _Launch, num_rows: int, ready: list[Sequence]) -> RowCounts:
        """Count drafts and rows of a round of `num_rows` rows a request behind accept; `ready` had not ended."""
        engine = self._engine
        tree_rows = engine.round.tree_rows
        padded = engine.graph.padded_size(len(settled.sequences))
        passes = engine.parts.drafter.requirements.rows_of_passes(num_rows)
        num_computed = engine.prune.catchup.num_computed
        return RowCounts(
            drafted=padded * (settled.num_drafted if tree_rows is None else tree_rows - 1),
            offered=sum(s.offered_per_round[-1] for s in ready) if tree_rows is None else len(ready) * (tree_rows - 1),
            verified=padded * (num_rows if tree_rows is None else tree_rows),
            catchup_computed=sum(num_computed(padded, rows) for rows in passes),
            catchup_live=len(passes) * len(ready),
        )

    def _stage_seconds(self, num_rounds: int) -> list[dict[str, float]]:
        """Keep the stages that exist: without drafts there is nothing to catch up, with one draft nothing recurs.

        Nothing is kept with overlap: the next round has recorded over this one's events.
        """
        if self._engine.overlap:
            return [{} for _ in range(num_rounds)]
        num_draft_tokens = self._engine.num_draft_tokens
        absent = {"catchup"} if num_draft_tokens == 0 else set()
        absent |= {"recur"} if num_draft_tokens <= 1 else set()
        return [
            {name: seconds for name, seconds in stages.items() if name not in absent}
            for stages in self._engine.parts.timer.collect(num_rounds)
        ]

    def _is_in_flight(self, sequence: Sequence) -> bool:
        """Tells whether a round that is still running may write this sequence's pages."""
        return self._in_flight is not None and sequence in self._in_flight.sequences

    def _retire_if_finished(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None or self._is_in_flight(sequence):
            return
        engine, request = self._engine, sequence.request
        engine.scheduler.release(sequence)
        engine.parts.slots.clear(sequence.slot)
        record = RequestRecord(
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
            finish_reason=sequence.finish_reason,
            max_new_tokens=request.max_new_tokens,
            admitted_at=sequence.admitted_at,
            emitted_at=sequence.emitted_at,
        )
        self._requests[request.request_id] = record
        if self._on_finish is not None:
            self._on_finish(record)
