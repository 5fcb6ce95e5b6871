"""The engine: admits requests, runs prompt passes and rounds, and records what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from spec_lab.core.protocols import GraphMode, PrunePolicy
from spec_lab.core.types import (
    GenerationResult,
    PrefillRecord,
    Request,
    RequestRecord,
    RoundRecord,
    RowCounts,
    Sequence,
)
from spec_lab.engine.prefill import PromptPass
from spec_lab.engine.round import DecodeRound, Parts
from spec_lab.engine.scheduler import Scheduler, emit_first, emit_round


@dataclass(slots=True)
class _Prefilling:
    """The prompt pass of one request so far."""

    num_chunks: int = 0
    seconds: float = 0.0
    rows: RowCounts = field(default_factory=RowCounts)


class Engine:
    """Generates for batches of requests. One engine owns its caches; targets and heads can be shared."""

    def __init__(
        self, parts: Parts, prune: PrunePolicy, graph: GraphMode, scheduler: Scheduler, prefill_chunk: int
    ) -> None:
        self.parts = parts
        self.graph = graph
        self.prune = prune
        self.scheduler = scheduler
        self.round = DecodeRound(parts)
        self.prompt_pass = PromptPass(parts, prune, prefill_chunk)

    @property
    def num_draft_tokens(self) -> int:
        return self.parts.drafter.num_draft_tokens

    def generate(
        self, requests: Iterable[Request], on_finish: Callable[[RequestRecord], None] | None = None
    ) -> GenerationResult:
        """Run all `requests` to their end; records come back in the order of submission."""
        requests = list(requests)
        self.scheduler.submit(requests)
        run = _GenerationRun(self, on_finish)
        try:
            with torch.inference_mode():
                while self.scheduler.has_work:
                    run.step()
        finally:
            for sequence in self.scheduler.running:
                self.parts.slots.clear(sequence.slot)
            self.scheduler.abort()
        return run.result(requests)


class _GenerationRun:
    """State of one `Engine.generate` call."""

    def __init__(self, engine: Engine, on_finish: Callable[[RequestRecord], None] | None) -> None:
        self._engine = engine
        self._on_finish = on_finish
        self._eos = engine.parts.target.eos_token_ids
        self._start = perf_counter()
        self._prefilling: dict[str, _Prefilling] = {}
        self._requests: dict[str, RequestRecord] = {}
        self._rounds: list[RoundRecord] = []
        self._prefills: list[PrefillRecord] = []

    def step(self) -> None:
        """Admit, run one chunk of each unfinished prompt, then one round of everything that is ready."""
        scheduler = self._engine.scheduler
        for sequence in scheduler.admit(self._now()):
            self._admit(sequence)
        assert scheduler.running, "what submit let in fits an empty engine"
        for sequence in [s for s in scheduler.running if s.is_prefilling]:
            self._prefill(sequence)
        ready = [s for s in scheduler.running if not s.is_prefilling]
        if ready:
            self._decode(ready)

    def result(self, requests: list[Request]) -> GenerationResult:
        return GenerationResult(
            requests=[self._requests[request.request_id] for request in requests],
            rounds=self._rounds,
            prefills=self._prefills,
            graph=replace(self._engine.graph.counts),
            num_draft_tokens=self._engine.num_draft_tokens,
            seconds=self._now(),
        )

    def _now(self) -> float:
        return perf_counter() - self._start

    def _admit(self, sequence: Sequence) -> None:
        parts = self._engine.parts
        parts.slots.clear(sequence.slot)
        parts.slots.table.assign(sequence.slot, sequence.pages)
        parts.rule.admit(sequence.slot, sequence.request)
        parts.drafter.admit(sequence.slot, sequence.request)
        self._prefilling[sequence.request.request_id] = _Prefilling()

    def _prefill(self, sequence: Sequence) -> None:
        request = sequence.request
        progress = self._prefilling[request.request_id]
        start = perf_counter()
        rows = self._engine.prompt_pass.run_chunk(sequence)
        progress.seconds += perf_counter() - start
        progress.num_chunks += 1
        progress.rows.add(rows)
        if sequence.is_prefilling:
            return
        done = self._prefilling.pop(request.request_id)
        prompt_len = len(request.prompt_ids)
        self._prefills.append(PrefillRecord(request.request_id, prompt_len, done.num_chunks, done.seconds, done.rows))
        emit_first(sequence, self._eos, self._now())
        self._retire_if_finished(sequence)

    def _decode(self, ready: list[Sequence]) -> None:
        engine, parts = self._engine, self._engine.parts
        start = perf_counter()
        with parts.timer.round():
            padded_size = engine.graph.padded_size(len(ready))
            batch = parts.slots.batch([s.slot for s in ready], padded_size, max(s.kv_len for s in ready))
            verification = engine.graph.run(engine.round.run, batch)
            with parts.timer.span("commit"):
                all_tokens, all_emitted = verification.tokens.tolist(), verification.num_emitted.tolist()
                relaxed = None if verification.num_relaxed is None else verification.num_relaxed.tolist()[: len(ready)]
        seconds = perf_counter() - start
        now = self._now()
        for sequence, tokens, num_emitted in zip(ready, all_tokens, all_emitted, strict=False):
            emit_round(sequence, tokens[:num_emitted], self._eos, now)
        self._rounds.append(self._record(ready, seconds, relaxed))
        for sequence in ready:
            self._retire_if_finished(sequence)

    def _record(self, ready: list[Sequence], seconds: float, relaxed: list[int] | None) -> RoundRecord:
        engine, drafter = self._engine, self._engine.parts.drafter
        rows = RowCounts()
        if drafter.requirements.catches_up:
            num_rows = drafter.num_draft_tokens + 1
            rows.catchup_live = len(ready)
            rows.catchup_computed = engine.prune.catchup.num_computed(engine.graph.padded_size(len(ready)), num_rows)
        return RoundRecord(
            index=len(self._rounds),
            request_ids=[s.request.request_id for s in ready],
            accepted=[s.accepted_per_round[-1] for s in ready],
            emitted=[s.emitted_per_round[-1] for s in ready],
            truncated=[s.truncated for s in ready],
            seconds=seconds,
            stage_seconds=self._stage_seconds(),
            rows=rows,
            relaxed=relaxed,
        )

    def _stage_seconds(self) -> dict[str, float]:
        """Stages that exist: without drafts there is nothing to catch up, with one draft nothing recurs."""
        stages = self._engine.parts.timer.collect()
        num_draft_tokens = self._engine.num_draft_tokens
        absent = {"catchup"} if num_draft_tokens == 0 else set()
        absent |= {"recur"} if num_draft_tokens <= 1 else set()
        return {name: seconds for name, seconds in stages.items() if name not in absent}

    def _retire_if_finished(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            return
        engine, request = self._engine, sequence.request
        engine.scheduler.release(sequence)
        engine.parts.slots.clear(sequence.slot)
        record = RequestRecord(
            request_id=request.request_id,
            category=request.category,
            prompt_ids=list(request.prompt_ids),
            output_ids=sequence.tokens[len(request.prompt_ids) :],
            answer=request.answer,
            accepted_per_round=sequence.accepted_per_round,
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
