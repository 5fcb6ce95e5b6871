"""Builds `summary.json` from what the timed passes produced.

Rates and times are medians over the timed repeats. What does not depend on the clock (acceptance, rows, accuracy) comes
from the first repeat: greedy runs repeat exactly, and `repeats_identical` says when one did not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from spec_lab.record import metrics
from spec_lab.record.provenance import Provenance
from spec_lab.record.schema import (
    SCHEMA_VERSION,
    Comparison,
    DivergenceCounts,
    DivergenceKind,
    Graph,
    Kernel,
    LatencyMs,
    Origin,
    Outcome,
    Ratio,
    Reference,
    Repeat,
    RoundWork,
    Speed,
    Status,
    Summary,
)
from spec_lab.record.verdict import verdict

if TYPE_CHECKING:
    from spec_lab.core.types import GenerationResult, RequestRecord, RoundRecord


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts that are known of a run before it starts.

    Attributes:
        name: the user's name for it.
        choices: what each group is called, an option such as `{"prune": "catchup"}`, or knobs that differ from every
            option, such as `{"sampling": "temperature0.7"}` (`spec_lab.cli.labels`).
        config: the resolved config, plain values only, paths as the user gave them.
        started_at: UTC, ISO 8601, to the microsecond.
    """

    name: str
    choices: dict[str, str]
    config: dict[str, Any]
    provenance: Provenance
    started_at: str


NOT_PROFILED = RoundWork(
    launches_per_round=None, replays_per_round=None, host_syncs_per_round=None, gpu_busy_ms_per_round=None
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration: a result per timed repeat, and what was found of the outputs of the first, by request id.

    Attributes:
        correct: whether the answer was right; None for one that was not checked.
        num_thinking_tokens: output tokens inside thinking; None where the tokenizer has no markers.
    """

    repeats: Sequence[GenerationResult] = ()
    correct: Mapping[str, bool | None] = field(default_factory=dict)
    num_thinking_tokens: Mapping[str, int] | None = None

    @property
    def requests(self) -> list[RequestRecord]:
        """The requests of the first repeat, from which everything untimed is counted."""
        return self.repeats[0].requests if self.repeats else []

    @property
    def rounds(self) -> list[RoundRecord]:
        """The rounds of the first repeat."""
        return self.repeats[0].rounds if self.repeats else []

    @property
    def num_draft_tokens(self) -> int:
        return self.repeats[0].num_draft_tokens if self.repeats else 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token of a request that differs from plain decoding.

    Attributes:
        index: its index into `output_ids`; the length of the shorter output where one is a prefix of the other.
        margin: plain decoding's own top-2 logit difference there, None where it was not computed.
        kind: `near_tie`, `bug`, or `lossy` under a rule that may differ.
    """

    request_id: str
    index: int
    margin: float | None
    kind: DivergenceKind


def build_summary(
    info: RunInfo,
    main: Measured,
    references: Mapping[str, Measured] | None = None,
    *,
    seconds: float,
    status: Status = "finished",
    reason: str | None = None,
    divergences: Sequence[Divergence] | None = None,
    kernels: Sequence[Kernel] = (),
    work: RoundWork | None = None,
    acceptance_imposed: bool = False,
    acceptance_lossless: bool | None = None,
) -> Summary:
    """The whole record of a run.

    Args:
        main: the configuration that was asked for.
        references: others by name, each with as many repeats as `main`, interleaved with it: `plain`, `unpruned`.
        seconds: wall time of the run so far.
        reason: why a run did not finish.
        divergences: result of the audit against plain decoding; None where there was none.
        kernels: from the profiled stretch.
        work: of a round of it; None where there was none.
        acceptance_imposed: the rule set how much is accepted, so acceptance is no result.
        acceptance_lossless: whether the rule promises plain decoding's output; None where no rule was at work.
    """
    references = references or {}
    first = main.repeats[0] if main.repeats else None
    num_draft_tokens = main.num_draft_tokens
    diverged = None if divergences is None else {divergence.request_id for divergence in divergences}
    work = work or NOT_PROFILED
    speed = _speed(main.repeats)
    summary: Summary = {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "reason": reason,
        "verdict": "",
        **_origin(info),
        "seconds": seconds,
        "num_draft_tokens": num_draft_tokens if first else None,
        **_outcome(main, main.requests, diverged),
        "acceptance_imposed": acceptance_imposed,
        "acceptance_lossless": acceptance_lossless,
        "accepted_histogram": metrics.accepted_histogram(main.requests, num_draft_tokens),
        "emitted_histogram": metrics.emitted_histogram(main.requests, num_draft_tokens),
        "verify_calls": len(first.rounds) if first else 0,
        **speed,
        **_comparison(main, references),
        "latency_ms": _latency_ms(main.repeats),
        **work,
        "gpu_idle_share": metrics.gpu_idle_share(work["gpu_busy_ms_per_round"], speed["round_ms"]),
        "kernels": list(kernels),
        "by_category": _by_category(main, diverged),
        "divergence": None if divergences is None else _count_divergences(len(main.requests), divergences),
        "definitions": metrics.DEFINITIONS,
    }
    summary["verdict"] = verdict(summary)
    return summary


def _origin(info: RunInfo) -> Origin:
    provenance = info.provenance
    return Origin(
        name=info.name,
        choices=info.choices,
        started_at=info.started_at,
        config=info.config,
        versions=provenance.versions,
        git_revision=provenance.git_revision,
        device=provenance.device,
        device_name=provenance.device_name,
        cpu_model=provenance.cpu_model,
        dtype=provenance.dtype,
        num_threads=provenance.num_threads,
        extensions=provenance.extensions,
    )


def _outcome(measured: Measured, requests: Sequence[RequestRecord], diverged: Collection[str] | None) -> Outcome:
    """Sums up some `requests` of a configuration. Acceptance is None without drafts: there is nothing to accept."""
    num_draft_tokens, correct = measured.num_draft_tokens, measured.correct
    return Outcome(
        num_requests=len(requests),
        rounds=metrics.num_request_rounds(requests),
        emitted_tokens=metrics.num_emitted_tokens(requests),
        output_tokens=metrics.num_output_tokens(requests),
        acceptance_length=metrics.acceptance_length(requests, num_draft_tokens) if num_draft_tokens else None,
        acceptance_length_all=metrics.acceptance_length_all(requests) if num_draft_tokens else None,
        acceptance_rate_by_position=metrics.acceptance_rate_by_position(requests, num_draft_tokens),
        accuracy=metrics.accuracy(correct.get(request.request_id) for request in requests),
        relaxed=metrics.relaxed_hits(requests, measured.rounds),
        thinking=metrics.thinking(requests, measured.num_thinking_tokens),
        equal_to_plain=metrics.equal_share(requests, diverged),
    )


def _speed(repeats: Sequence[GenerationResult]) -> Speed:
    over_repeats = metrics.median_over_repeats
    first = repeats[0] if repeats else None
    return Speed(
        decode_tokens_per_second=over_repeats(metrics.decode_tokens_per_second(result.rounds) for result in repeats),
        end_to_end_tokens_per_second=over_repeats(metrics.end_to_end_tokens_per_second(result) for result in repeats),
        repeats=[_repeat(result) for result in repeats],
        repeats_identical=_repeats_identical(repeats),
        round_ms=over_repeats(metrics.round_ms(result.rounds) for result in repeats),
        launch_ms=over_repeats(metrics.launch_ms(result.rounds) for result in repeats),
        stage_ms_per_round={
            stage: over_repeats(metrics.stage_ms(result.rounds, stage) for result in repeats)
            for stage in metrics.STAGES
        },
        prefill_ms_per_request=over_repeats(metrics.prefill_ms_per_request(result.prefills) for result in repeats),
        rows=metrics.rows(first.rounds, first.prefills) if first else metrics.rows([], []),
        graph=_graph(repeats),
    )


def _repeat(result: GenerationResult) -> Repeat:
    return Repeat(
        decode_tokens_per_second=metrics.decode_tokens_per_second(result.rounds),
        end_to_end_tokens_per_second=metrics.end_to_end_tokens_per_second(result),
        round_ms=metrics.round_ms(result.rounds),
        seconds=result.seconds,
    )


def _repeats_identical(repeats: Sequence[GenerationResult]) -> bool | None:
    """Tells whether every repeat gave the tokens of the first; None with fewer than two."""
    if len(repeats) < 2:
        return None
    outputs = [{request.request_id: request.output_ids for request in result.requests} for result in repeats]
    return all(output == outputs[0] for output in outputs[1:])


def _graph(repeats: Sequence[GenerationResult]) -> Graph:
    """The engine counts on from pass to pass, so the last repeat knows them all."""
    if not repeats:
        return Graph(mode=None, captures=0, replays=0, fallbacks=0, nodes={})
    counts = repeats[-1].graph
    return Graph(
        mode=counts.mode,
        captures=counts.captures,
        replays=counts.replays,
        fallbacks=counts.fallbacks,
        nodes=counts.nodes,
    )


def _comparison(main: Measured, references: Mapping[str, Measured]) -> Comparison:
    return Comparison(
        references={name: _reference(measured) for name, measured in references.items()},
        speedup=_ratio_over("plain", main, references),
        pruning_speedup=_ratio_over("unpruned", main, references),
        break_even_acceptance_length=_break_even(main, references),
        accuracy_change=metrics.accuracy_change(main.correct, references["plain"].correct, over="plain")
        if "plain" in references
        else None,
    )


def _reference(measured: Measured) -> Reference:
    return {**_speed(measured.repeats), **_outcome(measured, measured.requests, diverged=None)}


def _ratio_over(name: str, main: Measured, references: Mapping[str, Measured]) -> Ratio | None:
    if name not in references:
        return None
    rates, others = (
        [metrics.decode_tokens_per_second(result.rounds) for result in measured.repeats]
        for measured in (main, references[name])
    )
    return metrics.paired_ratio(rates, others, over=name)


def _break_even(main: Measured, references: Mapping[str, Measured]) -> float | None:
    """None without drafts: there is nothing that could pay."""
    if "plain" not in references or not any(result.num_draft_tokens for result in main.repeats):
        return None
    pairs = zip(main.repeats, references["plain"].repeats, strict=True)
    return metrics.median_over_repeats(
        metrics.break_even_acceptance_length(result.rounds, plain.rounds) for result, plain in pairs
    )


def _latency_ms(repeats: Sequence[GenerationResult]) -> LatencyMs:
    requests = [request for result in repeats for request in result.requests]
    return LatencyMs(
        ttft=metrics.latency(metrics.time_to_first_token_ms(requests)),
        tpot=metrics.latency(metrics.time_per_output_token_ms(requests)),
        itl=metrics.latency(metrics.inter_token_latency_ms(requests)),
        e2e=metrics.latency(metrics.end_to_end_latency_ms(requests)),
    )


def _by_category(measured: Measured, diverged: Collection[str] | None) -> dict[str, Outcome]:
    requests: dict[str, list[RequestRecord]] = {}
    for request in measured.requests:
        requests.setdefault(request.category, []).append(request)
    return {category: _outcome(measured, part, diverged) for category, part in sorted(requests.items())}


def _count_divergences(num_requests: int, divergences: Sequence[Divergence]) -> DivergenceCounts:
    kinds = [divergence.kind for divergence in divergences]
    margins = [divergence.margin for divergence in divergences if divergence.margin is not None]
    return DivergenceCounts(
        requests=num_requests,
        diverged=len(kinds),
        near_ties=kinds.count("near_tie"),
        bugs=kinds.count("bug"),
        lossy=kinds.count("lossy"),
        median_index=median([divergence.index for divergence in divergences]) if divergences else None,
        median_margin=median(margins) if margins else None,
    )
