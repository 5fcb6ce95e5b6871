"""Helpers that make generation results by hand, and run folders from them by the real recorder, so that records,
reports and tables can be tested without decoding anything.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_lab.core.origins import round_origins
from spec_lab.core.results import GenerationResult, GraphCounts, PrefillRecord, RequestRecord, RoundRecord, RowCounts
from spec_lab.core.types import FinishReason
from spec_lab.record.metric import Measured
from spec_lab.record.models import Divergence, Machine, Run, Target
from spec_lab.record.recorder import Recorder, Sink, request_row
from spec_lab.record.summary import finished_run
from spec_lab.record.trace import Kernel

CHOICES = {"target": "pocket", "drafter": "eagle3", "acceptance": "strict", "prune": "catchup", "graph": "eager"}
MACHINE = Machine(
    versions={"spec_lab": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "triton": None},
    git_revision="0123abc+dirty",
    cpu_model="a test CPU",
    device="cpu",
    device_name="a test CPU",
    num_threads=2,
)
TARGET = Target(name="pocket", digest="91344d74968d", template="0f1e2d3c4b5a", dtype="float32")
NUM_OFFERED = 16
"""Drafts that a round of `make_request` offers, unless it is told: more than any K there is."""
SURVIVAL = {"code": 0.9, "dates": 0.75, "prose": 0.5}
"""Chance that a draft token is accepted where the earlier ones were, by category."""


def make_request(
    request_id: str = "r0",
    accepted: Sequence[int] = (),
    emitted: Sequence[int] | None = None,
    *,
    judged: Sequence[int] | None = None,
    offered: Sequence[int] | None = None,
    truncated: bool = False,
    category: str = "code",
    admitted_at: float = 0.0,
    emitted_at: Sequence[float] | None = None,
) -> RequestRecord:
    """A request of which each round emitted what it accepted and one more, unless `emitted` says otherwise.

    No end of sequence cut a round, unless `judged` says otherwise.
    """
    emitted = [m + 1 for m in accepted] if emitted is None else list(emitted)
    return RequestRecord(
        request_id=request_id,
        category=category,
        prompt_ids=[1, 2, 3],
        output_ids=list(range(100, 101 + sum(emitted))),
        token_origins="p" + "".join(("a" * m + "c")[:n] for m, n in zip(accepted, emitted, strict=True)),
        answer="7",
        offered_per_round=[NUM_OFFERED] * len(accepted) if offered is None else list(offered),
        accepted_per_round=list(accepted),
        judged_per_round=[m + 1 for m in accepted] if judged is None else list(judged),
        emitted_per_round=emitted,
        truncated=truncated,
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.EOS,
        max_new_tokens=64,
        admitted_at=admitted_at,
        emitted_at=[float(index) for index in range(len(emitted) + 1)] if emitted_at is None else list(emitted_at),
    )


def make_round(
    emitted: Sequence[int],
    seconds: float,
    stage_seconds: dict[str, float] | None = None,
    rows: RowCounts | None = None,
    index: int = 0,
) -> RoundRecord:
    """A round over requests r0, r1, ..., none of them cut short."""
    return RoundRecord(
        index=index,
        request_ids=[f"r{i}" for i in range(len(emitted))],
        accepted=[n - 1 for n in emitted],
        emitted=list(emitted),
        truncated=[False] * len(emitted),
        seconds=seconds,
        stage_seconds=stage_seconds or {},
        rows=rows or RowCounts(),
    )


@dataclass(frozen=True, slots=True)
class FakeEngine:
    """Decodes one request after the other, with a made-up clock.

    Attributes:
        stage_ms: milliseconds of each stage that can be told apart.
        computed_rows: catch-up rows carried past the KV write, a round.
    """

    num_draft_tokens: int
    stage_ms: dict[str, float]
    computed_rows: int = 0
    logit_rows: int = 3
    max_new_tokens: int = 24

    def generate(self, num_requests: int = 12, seed: int = 0, slowdown: float = 1.0) -> GenerationResult:
        """Decode all requests; the tokens follow from `seed`, and `slowdown` stretches all times."""
        rng = random.Random(seed)
        clock = 0.0
        requests: list[RequestRecord] = []
        rounds: list[RoundRecord] = []
        prefills: list[PrefillRecord] = []
        for number in range(num_requests):
            category = list(SURVIVAL)[number % len(SURVIVAL)]
            clock += 0.002 * slowdown
            rows = RowCounts(prefill_computed=self.logit_rows, prefill_hidden=3, prefill_logits=self.logit_rows)
            prefills.append(PrefillRecord(f"r{number}", 3, 1, 0.002 * slowdown, rows))
            record = make_request(f"r{number}", category=category, emitted_at=[clock])
            self._decode(record, rounds, rng, slowdown)
            clock = record.emitted_at[-1]
            requests.append(record)
        return GenerationResult(requests, rounds, prefills, GraphCounts(), self.num_draft_tokens, clock)

    def _decode(self, record: RequestRecord, rounds: list[RoundRecord], rng: random.Random, slowdown: float) -> None:
        while len(record.output_ids) < self.max_new_tokens:
            accepted = 0
            while accepted < self.num_draft_tokens and rng.random() < SURVIVAL[record.category]:
                accepted += 1
            emitted = min(accepted + 1, self.max_new_tokens - len(record.output_ids))
            record.truncated = emitted < accepted + 1
            record.finish_reason = FinishReason.LENGTH
            record.offered_per_round.append(self.num_draft_tokens)
            record.accepted_per_round.append(accepted)
            record.judged_per_round.append(accepted + 1)
            record.emitted_per_round.append(emitted)
            record.output_ids += [rng.randrange(1000) for _ in range(emitted)]
            record.token_origins += round_origins(accepted + 1, self.num_draft_tokens, None)[:emitted]
            stages = {name: slowdown * ms / 1e3 for name, ms in self.stage_ms.items()}
            seconds = sum(stages.values()) + 2e-5 * slowdown
            record.emitted_at.append(record.emitted_at[-1] + seconds)
            rows = RowCounts(
                catchup_attention=self.computed_rows,
                catchup_output=self.computed_rows,
                catchup_mlp=self.computed_rows,
                catchup_live=1 if self.num_draft_tokens else 0,
            )
            rounds.append(
                RoundRecord(
                    index=len(rounds),
                    request_ids=[record.request_id],
                    accepted=[accepted],
                    emitted=[emitted],
                    truncated=[record.truncated],
                    seconds=seconds,
                    stage_seconds=stages,
                    rows=rows,
                )
            )


MAIN = FakeEngine(3, {"verify": 2.4, "accept": 0.1, "catchup": 0.4, "recur": 0.7, "commit": 0.05}, 1, logit_rows=1)
UNPRUNED = FakeEngine(3, {"verify": 2.4, "accept": 0.1, "catchup": 0.45, "recur": 0.7, "commit": 0.05}, 4)
PLAIN = FakeEngine(0, {"verify": 2.1, "accept": 0.05, "commit": 0.05})


NEAR_TIE = {"r1": Divergence(index=5, margin=3e-5, kind="near_tie")}


def measure(
    engine: FakeEngine,
    slowdowns: Sequence[float] = (1.0, 1.02, 0.99),
    seed: int = 0,
    divergences: Mapping[str, Divergence] | None = None,
) -> Measured:
    """What the runner measures with an engine: one repeat for each entry of `slowdowns`. Three in four answers that are
    checked are right. Outputs were compared with plain decoding's if `divergences` are given."""
    repeats = [engine.generate(seed=seed, slowdown=slowdown) for slowdown in slowdowns]
    requests = [
        request_row(
            record,
            text=f"text of {record.request_id}",
            correct=None if record.category == "prose" else index % 4 != 0,
            divergence=(divergences or {}).get(record.request_id),
            thinking_spans=[(1, 4)] if index % 2 else [],
        )
        for index, record in enumerate(repeats[0].requests)
    ]
    return Measured(requests, repeats, engine.num_draft_tokens, {}, divergences is not None)


def make_begun(config: dict[str, Any] | None = None, **changes: Any) -> Run:
    """A run of which nothing is measured yet."""
    config = config or {"name": "run", "batch_size": 1, "seed": 0, "drafter": {"name": "eagle3", "num_draft_tokens": 3}}
    fields = {"started_at": "2026-01-02T03:04:05+00:00", "choices": dict(CHOICES), "machine": MACHINE, "target": TARGET}
    return Run(status="interrupted", config=config, **{**fields, **changes})


def make_run(
    begun: Run | None = None,
    main: Measured | None = None,
    references: Mapping[str, Measured] | None = None,
    **found: Any,
) -> Run:
    """The record of a finished run, by default with both references."""
    usual = {"plain": measure(PLAIN, (1.01, 1.0, 1.03)), "unpruned": measure(UNPRUNED, (1.0, 1.0, 1.0))}
    main = replace(main or measure(MAIN, divergences=NEAR_TIE), references=usual if references is None else references)
    kernels = [Kernel(name="gemm", calls_per_round=40.0, us_per_round=900.0)]
    fields: dict[str, Any] = {
        "seconds": 12.5,
        "kernels": kernels,
        "acceptance_lossless": True,
        "acceptance_imposed": False,
    }
    return finished_run(begun or make_begun(), main, **{**fields, **found})


def record_run(
    folder: Path, sinks: Sequence[Sink] = (), begun: Run | None = None, main: Measured | None = None, **found: Any
) -> Run:
    """Record a run into a folder, as the runner does with its results."""
    begun, main = begun or make_begun(), main or measure(MAIN, divergences=NEAR_TIE)
    run = make_run(begun, main, **found)
    with Recorder.open(folder, begun, sinks) as recorder:
        for index, result in enumerate(main.repeats):
            recorder.rounds(index, result.rounds)
        recorder.requests(main.requests)
        recorder.finish(run)
    return run
