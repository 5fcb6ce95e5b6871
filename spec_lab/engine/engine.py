"""The engine admits requests, runs prompt passes and rounds, and records what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep

import torch

from spec_lab.core.kept import PrunePolicy
from spec_lab.core.protocols import HostDrafter
from spec_lab.core.results import GenerationResult, PrefillRecord, RequestRecord, RowCounts
from spec_lab.core.types import Request, Sequence
from spec_lab.engine.accounts import Launch, RoundAccounts, request_record
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.measured_costs import tell_costs
from spec_lab.engine.plan import OFF
from spec_lab.engine.prefill import PromptPass
from spec_lab.engine.readback import read_later
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.rounds import Rounds
from spec_lab.engine.scheduler import Scheduler, emit_first


@dataclass(slots=True)
class _Prefilling:
    """The rows and time that the prompt pass of one request has taken so far."""

    num_chunks: int = 0
    seconds: float = 0.0
    rows: RowCounts = field(default_factory=RowCounts)


@dataclass(eq=False)
class Engine:
    """Generates for batches of requests. An engine owns its caches; engines can share targets and heads.

    Attributes:
        overlap: where possible, the host launches the next round before it reads a round's results.
    """

    rounds: Rounds
    prune: PrunePolicy
    graph: GraphMode
    scheduler: Scheduler
    prompt_pass: PromptPass
    overlap: bool = False

    def __post_init__(self) -> None:
        self.parts = self.rounds.widest.parts

    @property
    def round(self) -> DecodeRound:
        """Return the round of the largest K."""
        return self.rounds.widest

    @property
    def host_drafter(self) -> HostDrafter | None:
        """Return the drafter that runs on the host; None if there is none."""
        return self.parts.drafter.requirements.on_host

    @property
    def num_draft_tokens(self) -> int:
        return self.parts.drafter.num_draft_tokens

    def prepare(self) -> None:
        """Capture the graphs for rounds of every size, so that no timed pass captures any.

        With a plan, measure what rounds cost. It captures the others when it first chooses them.
        """
        with torch.inference_mode():
            tell_costs(self.parts, self.graph, self.rounds, self.scheduler)
            for num_requests in range(1, self.scheduler.num_slots + 1 if self.rounds.plan is None else 1):
                for decode_round in self.rounds.to_prepare(self.rounds.most):
                    self.graph.prepare(decode_round, num_requests)
            self.prompt_pass.prepare()

    def generate(
        self, requests: Iterable[Request], on_finish: Callable[[RequestRecord], None] | None = None
    ) -> GenerationResult:
        """Run all `requests` to their end; the records of requests are in the order of submission."""
        requests = list(requests)
        self.scheduler.submit(requests)
        with torch.inference_mode():
            tell_costs(self.parts, self.graph, self.rounds, self.scheduler)  # before anything counts or is timed
            run = _GenerationRun(self, on_finish)
            self.parts.experts_read.restart()
            if self.host_drafter is not None:
                self.host_drafter.restart()
            if self.rounds.plan is not None:
                self.rounds.plan.restart()
            try:
                while self.scheduler.has_work:
                    run.step()
            finally:
                self.scheduler.abort()
        return run.result(requests)


class _GenerationRun:
    """The state of one `Engine.generate` call."""

    def __init__(self, engine: Engine, on_finish: Callable[[RequestRecord], None] | None) -> None:
        self._engine = engine
        self._on_finish = on_finish
        self._eos = engine.parts.target.eos_token_ids
        self._accounts = RoundAccounts(
            parts=engine.parts,
            graph=engine.graph,
            catchup=engine.prune.catchup,
            tree_rows=engine.round.drafts.tree_rows,
            overlap=engine.overlap,
            now=self._now,
            plan=engine.rounds.plan,
        )
        self._start = perf_counter()
        self._prefilling: dict[str, _Prefilling] = {}
        self._requests: dict[str, RequestRecord] = {}
        self._prefills: list[PrefillRecord] = []
        self._in_flight: Launch | None = None
        self._num_prompt_forwards = 0

    def step(self) -> None:
        """Admit requests, run one chunk of each unfinished prompt, then launch the next round of all ready requests.

        Prompt chunks share forwards as far as they fit. In a captured mode the host only checks, between the end of a
        round and the next launch, whether a request may have ended. It accounts for tokens and records while the device
        runs the next round. The accounting comes before the next launch in three cases: a request may have ended, an
        eager round needs the lengths, or a drafter on the host needs the tokens. A graph of several rounds is launched
        like one round.

        With overlap the host launches the next round before it reads the previous one. Before a prompt pass it reads
        first, so that no round's time includes a prompt's; the prompt pass waits for the device anyway. It also reads
        first if the device has ended requests, which the next launch leaves out.
        """
        scheduler = self._engine.scheduler
        for sequence in scheduler.admit(self._now()):
            self._admit(sequence)
        if not scheduler.running:  # submit refuses requests that do not fit an empty engine, so one is yet to arrive
            self._accounts.catch_up()
            sleep(scheduler.seconds_to_arrival(self._now()))
            return
        prefilling = [s for s in scheduler.running if s.is_prefilling] if self._prefilling else []
        if self._in_flight is not None and (prefilling or self._ended_on_device(self._in_flight)):
            in_flight, self._in_flight = self._in_flight, None
            self._settle(in_flight)
        for pack in self._engine.prompt_pass.packs(prefilling):
            self._prefill(pack)
        ready = [s for s in scheduler.running if s.finish_reason is None]
        if self._prefilling:
            ready = [s for s in ready if not s.is_prefilling]
        launched = self._launch(ready, follows=not prefilling) if ready else None
        self._accounts.catch_up()
        if ready:
            self._engine.rounds.review(ready)
        if self._engine.overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._settle(launched)

    def result(self, requests: list[Request]) -> GenerationResult:
        self._accounts.catch_up()
        counts = self._engine.graph.counts
        has_loop = self._engine.parts.drafter.requirements.has_loop
        return GenerationResult(
            requests=[self._requests[request.request_id] for request in requests],
            rounds=self._accounts.rounds,
            prefills=self._prefills,
            num_prompt_forwards=self._num_prompt_forwards,
            graph=replace(counts, nodes=dict(counts.nodes), no_loop=not has_loop),
            num_draft_tokens=self._engine.num_draft_tokens,
            seconds=self._now(),
            experts_read=self._engine.parts.experts_read.read(),
            expert_bytes_read=self._engine.parts.experts_read.read_bytes(),
            num_wasted_rounds=self._accounts.num_wasted_rounds,
        )

    def _now(self) -> float:
        return perf_counter() - self._start

    def _admit(self, sequence: Sequence) -> None:
        parts = self._engine.parts
        parts.slots.clear(sequence.slot)
        parts.slots.table.assign(sequence.slot, sequence.pages)
        parts.rule.admit(sequence.slot, sequence.request)
        parts.drafter.admit(sequence.slot, sequence.request)
        if self._engine.host_drafter is not None:
            self._engine.host_drafter.admit(sequence.slot, sequence.request)
        self._engine.graph.admit(sequence.slot, sequence.request)
        self._engine.rounds.admit(sequence.slot, sequence.request)
        self._prefilling[sequence.request.request_id] = _Prefilling()

    def _prefill(self, pack: list[Sequence]) -> None:
        """Run a chunk of each of `pack` in one forward, and split its time in proportion to their rows."""
        before = [sequence.num_prefilled for sequence in pack]
        start = perf_counter()
        with self._engine.parts.timer.unmarked():  # the spans of a drafter here belong to no round
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
        self._prefills.append(
            PrefillRecord(request.request_id, prompt_len, done.num_chunks, done.seconds, rows=done.rows)
        )
        sequence.num_waiting = self._engine.rounds.most.num_made
        emit_first(sequence, self._eos, self._now())
        self._retire_if_finished(sequence)

    def _launch(self, ready: list[Sequence], follows: bool) -> Launch:
        """Launch a round, or R rounds. If it `follows` another without a prompt pass in between, its time begins when
        the host last read results."""
        engine, parts = self._engine, self._engine.parts
        rounds, num_captures = engine.rounds, engine.graph.counts.captures
        num_missed = sum(sequence.num_missed for sequence in ready)
        choice = rounds.choose(ready)
        shape = choice.shape
        for possible in rounds.to_prepare(shape):
            engine.graph.prepare(possible, len(ready))
        follows &= engine.graph.counts.captures == num_captures  # no round's time includes a capture
        launched_at = self._now()
        began_at = self._accounts.read_at if follows else launched_at
        num_looked_up = 0
        with parts.timer.round(engine.graph.rounds_per_replay):
            if rounds.host is not None and shape != OFF:
                with parts.timer.span("lookup"):
                    offer = rounds.host.offer(ready)
                num_looked_up = offer.num_drafts
                shape = rounds.with_room_for(shape, offer.longest)
            elif rounds.host is not None:
                rounds.host.sit_out(ready)
            decode_round = rounds.of_shape(shape)
            verification = engine.graph.run(decode_round, [s.slot for s in ready], max(s.kv_len for s in ready))
            with parts.timer.span("readback"):
                result = read_later(verification)
        launch_seconds = self._now() - launched_at
        return Launch(
            sequences=ready,
            began_at=began_at,
            launch_seconds=launch_seconds,
            round=decode_round,
            result=result,
            spans=parts.timer.spans,
            num_missed=num_missed,
            num_looked_up=num_looked_up,
            num_tokens=choice.num_tokens,
        )

    def _settle(self, settled: Launch) -> None:
        # A drafter on the host needs the tokens.
        looks = self._engine.graph.looks_at_lengths or self._engine.host_drafter is not None
        if self._accounts.read(settled) or looks:
            self._accounts.catch_up()
            for sequence in settled.sequences:
                self._retire_if_finished(sequence)

    def _ended_on_device(self, launched: Launch) -> bool:
        """Return whether the device has ended a request of `launched` in an earlier launch.

        Only a graph of several rounds ends requests on the device.
        """
        has_ended = any(sequence.finish_reason is not None for sequence in launched.sequences)
        return has_ended and self._engine.graph.rounds_per_replay > 1

    def _retire_if_finished(self, sequence: Sequence) -> None:
        # A round that is still running may write the sequence's pages.
        is_in_flight = self._in_flight is not None and sequence in self._in_flight.sequences
        if sequence.finish_reason is None or is_in_flight:
            return
        engine, request = self._engine, sequence.request
        if engine.host_drafter is not None:
            engine.host_drafter.finish(sequence)
        engine.scheduler.release(sequence)  # the slot is cleared later, when the next request takes it
        record = request_record(sequence, sequence.finish_reason)
        self._requests[request.request_id] = record
        if self._on_finish is not None:
            self._on_finish(record)
