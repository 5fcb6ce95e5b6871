"""Builds `summary.json` from what the timed passes produced.

Rates and times are medians over the timed repeats. What does not depend on the clock (acceptance, rows, accuracy) comes
from the first repeat: greedy runs repeat exactly, and `repeats_identical` says when one did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spec_lab.record import metrics
from spec_lab.record.provenance import Provenance
from spec_lab.record.schema import (
    SCHEMA_VERSION,
    CategorySummary,
    DivergenceCounts,
    DivergenceKind,
    Graph,
    Kernel,
    LatencyMs,
    Reference,
    Repeat,
    Status,
    Summary,
)
from spec_lab.record.verdict import verdict

if TYPE_CHECKING:
    from spec_lab.core.types import GenerationResult, RequestRecord


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known of a run before it starts.

    Attributes:
        name: the user's name for it.
        choices: option taken of each Hydra group, such as `{"drafter": "eagle3", "prune": "catchup"}`.
        config: the resolved config, plain values only, paths as the user gave them.
        started_at: UTC, ISO 8601, to the microsecond.
    """

    name: str
    choices: dict[str, str]
    config: dict[str, Any]
    provenance: Provenance
    started_at: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration: a result per timed repeat, and by request id whether its answer was right (None: unchecked)."""

    repeats: Sequence[GenerationResult] = ()
    correct: Mapping[str, bool | None] = field(default_factory=dict)

    @property
    def requests(self) -> list[RequestRecord]:
        """Those of the first repeat, from which everything untimed is counted."""
        return self.repeats[0].requests if self.repeats else []


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
    acceptance_imposed: bool = False,
) -> Summary:
    """The whole record of a run.

    Args:
        main: the configuration that was asked for.
        references: others by name, each with as many repeats as `main`, interleaved with it: `plain`, `unpruned`.
        seconds: wall time of the run so far.
        reason: why a run did not finish.
        divergences: result of the audit against plain decoding; None where there was none.
        kernels: from the profiled stretch.
        acceptance_imposed: the rule set how much is accepted, so acceptance is no result.
    """
    references = references or {}
    first = main.repeats[0] if main.repeats else None
    num_draft_tokens = first.num_draft_tokens if first else None
    provenance = info.provenance
    summary = Summary(
        schema_version=SCHEMA_VERSION,
        status=status,
        reason=reason,
        verdict="",
        name=info.name,
        choices=info.choices,
        started_at=info.started_at,
        seconds=seconds,
        config=info.config,
        versions=provenance.versions,
        git_revision=provenance.git_revision,
        device=provenance.device,
        device_name=provenance.device_name,
        cpu_model=provenance.cpu_model,
        dtype=provenance.dtype,
        num_threads=provenance.num_threads,
        num_draft_tokens=num_draft_tokens,
        num_requests=len(main.requests),
        acceptance_length=_acceptance_length(main.requests, num_draft_tokens),
        acceptance_length_all=metrics.acceptance_length_all(main.requests) if num_draft_tokens else None,
        acceptance_imposed=acceptance_imposed,
        acceptance_rate_by_position=metrics.acceptance_rate_by_position(main.requests, num_draft_tokens or 0),
        accepted_histogram=metrics.accepted_histogram(main.requests, num_draft_tokens or 0),
        emitted_histogram=metrics.emitted_histogram(main.requests, num_draft_tokens or 0),
        rounds=metrics.num_request_rounds(main.requests),
        verify_calls=len(first.rounds) if first else 0,
        emitted_tokens=metrics.num_emitted_tokens(main.requests),
        output_tokens=metrics.num_output_tokens(main.requests),
        decode_tokens_per_second=_decode_rate(main),
        end_to_end_tokens_per_second=_end_to_end_rate(main),
        repeats=[_repeat(result) for result in main.repeats],
        repeats_identical=_repeats_identical(main),
        references={name: _reference(measured) for name, measured in references.items()},
        speedup=_ratio_over("plain", main, references),
        pruning_speedup=_ratio_over("unpruned", main, references),
        break_even_acceptance_length=_break_even(main, references) if num_draft_tokens else None,
        round_ms=metrics.median_over_repeats(metrics.round_ms(result.rounds) for result in main.repeats),
        stage_ms_per_round=_stage_ms(main),
        prefill_ms_per_request=_prefill_ms(main),
        latency_ms=_latency_ms(main),
        kernels=list(kernels),
        rows=metrics.rows(first.rounds, first.prefills) if first else metrics.rows([], []),
        graph=_graph(main),
        accuracy=metrics.accuracy(main.correct.values()),
        by_category=_by_category(main, num_draft_tokens),
        divergence=None if divergences is None else _count_divergences(len(main.requests), divergences),
        definitions=metrics.DEFINITIONS,
    )
    summary["verdict"] = verdict(summary)
    return summary


def _acceptance_length(requests: Sequence[RequestRecord], num_draft_tokens: int | None) -> float | None:
    """None without drafts: there is nothing to accept."""
    return metrics.acceptance_length(requests) if num_draft_tokens else None


def _decode_rate(measured: Measured) -> float | None:
    return metrics.median_over_repeats(metrics.decode_tokens_per_second(result.rounds) for result in measured.repeats)


def _end_to_end_rate(measured: Measured) -> float | None:
    return metrics.median_over_repeats(metrics.end_to_end_tokens_per_second(result) for result in measured.repeats)


def _prefill_ms(measured: Measured) -> float | None:
    return metrics.median_over_repeats(metrics.prefill_ms_per_request(result.prefills) for result in measured.repeats)


def _stage_ms(measured: Measured) -> dict[str, float | None]:
    return {
        stage: metrics.median_over_repeats(metrics.stage_ms(result.rounds, stage) for result in measured.repeats)
        for stage in metrics.STAGES
    }


def _latency_ms(measured: Measured) -> LatencyMs:
    requests = [request for result in measured.repeats for request in result.requests]
    return LatencyMs(
        ttft=metrics.latency(metrics.time_to_first_token_ms(requests)),
        tpot=metrics.latency(metrics.time_per_output_token_ms(requests)),
        itl=metrics.latency(metrics.inter_token_latency_ms(requests)),
        e2e=metrics.latency(metrics.end_to_end_latency_ms(requests)),
    )


def _repeat(result: GenerationResult) -> Repeat:
    return Repeat(
        decode_tokens_per_second=metrics.decode_tokens_per_second(result.rounds),
        end_to_end_tokens_per_second=metrics.end_to_end_tokens_per_second(result),
        round_ms=metrics.round_ms(result.rounds),
        seconds=result.seconds,
    )


def _repeats_identical(measured: Measured) -> bool | None:
    """Whether every repeat gave the tokens of the first; None with fewer than two."""
    if len(measured.repeats) < 2:
        return None
    outputs = [{request.request_id: request.output_ids for request in result.requests} for result in measured.repeats]
    return all(output == outputs[0] for output in outputs[1:])


def _graph(measured: Measured) -> Graph:
    counts = [result.graph for result in measured.repeats]
    return Graph(
        mode=counts[0].mode if counts else None,
        captures=sum(count.captures for count in counts),
        replays=sum(count.replays for count in counts),
        fallbacks=sum(count.fallbacks for count in counts),
    )


def _reference(measured: Measured) -> Reference:
    first = measured.repeats[0]
    return Reference(
        decode_tokens_per_second=_decode_rate(measured),
        end_to_end_tokens_per_second=_end_to_end_rate(measured),
        graph=_graph(measured),
        acceptance_length=_acceptance_length(measured.requests, first.num_draft_tokens),
        round_ms=metrics.median_over_repeats(metrics.round_ms(result.rounds) for result in measured.repeats),
        stage_ms_per_round=_stage_ms(measured),
        prefill_ms_per_request=_prefill_ms(measured),
        rows=metrics.rows(first.rounds, first.prefills),
        accuracy=metrics.accuracy(measured.correct.values()),
        repeats=[_repeat(result) for result in measured.repeats],
    )


def _ratio_over(name: str, main: Measured, references: Mapping[str, Measured]) -> Any:
    if name not in references:
        return None
    rates, others = (
        [metrics.decode_tokens_per_second(result.rounds) for result in measured.repeats]
        for measured in (main, references[name])
    )
    return metrics.paired_ratio(rates, others, over=name)


def _break_even(main: Measured, references: Mapping[str, Measured]) -> float | None:
    if "plain" not in references:
        return None
    pairs = zip(main.repeats, references["plain"].repeats, strict=True)
    return metrics.median_over_repeats(
        metrics.break_even_acceptance_length(result.rounds, plain.rounds) for result, plain in pairs
    )


def _by_category(measured: Measured, num_draft_tokens: int | None) -> dict[str, CategorySummary]:
    requests: dict[str, list[RequestRecord]] = {}
    for request in measured.requests:
        requests.setdefault(request.category, []).append(request)
    return {
        category: CategorySummary(
            num_requests=len(part),
            rounds=metrics.num_request_rounds(part),
            output_tokens=metrics.num_output_tokens(part),
            acceptance_length=_acceptance_length(part, num_draft_tokens),
            acceptance_rate_by_position=metrics.acceptance_rate_by_position(part, num_draft_tokens or 0),
            accuracy=metrics.accuracy(measured.correct.get(request.request_id) for request in part),
        )
        for category, part in sorted(requests.items())
    }


def _count_divergences(num_requests: int, divergences: Sequence[Divergence]) -> DivergenceCounts:
    kinds = [divergence.kind for divergence in divergences]
    return DivergenceCounts(
        requests=num_requests,
        diverged=len(kinds),
        near_ties=kinds.count("near_tie"),
        bugs=kinds.count("bug"),
    )
