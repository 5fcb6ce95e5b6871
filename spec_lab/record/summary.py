"""Builds `summary.json` from the results of the timed passes.

Tokens per second and the times of rounds, stages and prompts are medians over the timed repeats. Latencies are over the
requests of all of them. The work of a round and the kernels' times are of the profiled rounds.
Acceptance, rows and accuracy are those of the first repeat, since every repeat should give the same tokens, also if
they are sampled. `repeats_identical` says whether they did.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from spec_lab.record import acceptance_metrics, answer_metrics, averages, definitions, time_metrics
from spec_lab.record.measured import Divergence, Measured, RunInfo
from spec_lab.record.metrics import OwnMetrics
from spec_lab.record.schema import (
    SCHEMA_VERSION,
    Comparison,
    DivergenceCounts,
    Graph,
    Kernel,
    LatencyMs,
    Memory,
    Origin,
    Outcome,
    Ratio,
    Reference,
    Repeat,
    Results,
    RoundWork,
    Speed,
    Status,
    Summary,
)
from spec_lab.record.verdict import verdict

if TYPE_CHECKING:
    from spec_lab.core.results import GenerationResult, RequestRecord


NOT_PROFILED = RoundWork(
    launches_per_round=None, replays_per_round=None, host_syncs_per_round=None, gpu_busy_ms_per_round=None
)


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
    row_invariant: bool | None = None,
    memory: Memory | None = None,
    metrics: OwnMetrics | None = None,
) -> Summary:
    """Make the summary of a run.

    Args:
        main: the configuration that the user asked for.
        references: other configurations by name (`plain`, `unpruned`, `eager`), each with as many repeats as `main`;
            they take turns with it.
        seconds: wall time of the run so far.
        reason: why a run did not finish.
        divergences: results of the audit against plain decoding; None if there was no audit.
        kernels: the kernels of the profiled rounds.
        work: the work of a round, averaged over profiled rounds; None if no round was profiled.
        acceptance_imposed: whether the rule sets how much is accepted, so that acceptance is not a result.
        acceptance_lossless: whether the rule promises the target's distribution. At temperature 0 that is plain
            decoding's output. None without results.
        row_invariant: whether a row gets the same bits from the target alone and in a forward of a few rows; None if
            nothing was loaded.
        memory: memory of the process and its GPU; None if it was not measured.
        metrics: the metrics of extensions.
    """
    own = metrics or OwnMetrics()
    diverged = None if divergences is None else {divergence.request_id for divergence in divergences}
    summary: Summary = {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "reason": reason,
        "verdict": "",
        **_origin(info),
        "seconds": seconds,
        "acceptance_imposed": acceptance_imposed,
        "acceptance_lossless": acceptance_lossless,
        "row_invariant": row_invariant,
        "memory": memory,
        **_results(main, references or {}, diverged, kernels, work or NOT_PROFILED, own),
        "divergence": None if divergences is None else _count_divergences(len(main.requests), divergences),
        "definitions": {**definitions.DEFINITIONS, **own.definitions},
    }
    summary["verdict"] = verdict(summary)
    return summary


def _results(
    main: Measured,
    references: Mapping[str, Measured],
    diverged: Collection[str] | None,
    kernels: Sequence[Kernel],
    work: RoundWork,
    metrics: OwnMetrics,
) -> Results:
    first, num_draft_tokens = main.repeats[0] if main.repeats else None, main.num_draft_tokens
    speed = _speed(main.repeats, metrics)
    return {
        "num_draft_tokens": num_draft_tokens if first else None,
        "tree_rows": first.tree_rows if first else None,
        **_outcome(main, main.requests, diverged),
        "accepted_histogram": acceptance_metrics.accepted_histogram(main.requests, num_draft_tokens),
        "emitted_histogram": acceptance_metrics.emitted_histogram(main.requests, num_draft_tokens),
        "verify_calls": len(first.rounds) if first else 0,
        **speed,
        **_comparison(main, references, metrics),
        "latency_ms": _latency_ms(main.repeats),
        **work,
        "gpu_idle_share": time_metrics.gpu_idle_share(
            work["gpu_busy_ms_per_round"],
            averages.median_over_repeats(time_metrics.launched_round_ms(result) for result in main.repeats),
        ),
        "kernels": list(kernels),
        "by_category": _by_category(main, diverged),
    }


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
        world_size=provenance.world_size,
        weight_dtype=provenance.weight_dtype,
        stored_types=provenance.stored_types,
        template=provenance.template,
        target_digest=provenance.target_digest,
        thinking_markers=provenance.thinking_markers,
    )


def _outcome(measured: Measured, requests: Sequence[RequestRecord], diverged: Collection[str] | None) -> Outcome:
    """Summarise some `requests` of a configuration. The acceptance lengths are None if there are no drafts."""
    num_draft_tokens, correct = measured.num_draft_tokens, measured.correct
    return Outcome(
        num_requests=len(requests),
        rounds=acceptance_metrics.num_request_rounds(requests),
        emitted_tokens=acceptance_metrics.num_emitted_tokens(requests),
        output_tokens=acceptance_metrics.num_output_tokens(requests),
        acceptance_length=acceptance_metrics.acceptance_length(requests, num_draft_tokens)
        if num_draft_tokens
        else None,
        acceptance_length_all=acceptance_metrics.acceptance_length_all(requests) if num_draft_tokens else None,
        acceptance_rate_by_position=acceptance_metrics.acceptance_rate_by_position(requests, num_draft_tokens),
        accuracy=answer_metrics.accuracy(
            (correct.get(request.request_id) for request in requests),
            (request.finish_reason.value == "length" for request in requests),
        ),
        relaxed=acceptance_metrics.relaxed_hits(requests, measured.rounds),
        distance=acceptance_metrics.distance(requests, measured.rounds),
        parts=acceptance_metrics.parts(requests),
        thinking=answer_metrics.thinking(requests, measured.num_thinking_tokens),
        equal_to_plain=answer_metrics.equal_share(requests, diverged),
    )


def _speed(repeats: Sequence[GenerationResult], metrics: OwnMetrics) -> Speed:
    over_repeats = averages.median_over_repeats
    first = repeats[0] if repeats else None
    return Speed(
        decode_tokens_per_second=over_repeats(
            time_metrics.decode_tokens_per_second(result.rounds) for result in repeats
        ),
        end_to_end_tokens_per_second=over_repeats(
            time_metrics.end_to_end_tokens_per_second(result) for result in repeats
        ),
        repeats=[_repeat(result) for result in repeats],
        repeats_identical=_repeats_identical(repeats),
        round_ms=over_repeats(time_metrics.round_ms(result.rounds) for result in repeats),
        launch_ms=over_repeats(time_metrics.launch_ms(result.rounds) for result in repeats),
        stage_ms_per_round={
            stage: over_repeats(time_metrics.stage_ms(result.rounds, stage) for result in repeats)
            for stage in time_metrics.stages_of(repeats)
        },
        prefill_ms_per_request=over_repeats(time_metrics.prefill_ms_per_request(result.prefills) for result in repeats),
        prompt_forwards=first.num_prompt_forwards if first else 0,
        rows=acceptance_metrics.rows(first.rounds, first.prefills) if first else acceptance_metrics.rows([], []),
        experts_read=acceptance_metrics.experts_read(first) if first else None,
        expert_bytes_read=acceptance_metrics.expert_bytes_read(first) if first else None,
        graph=_graph(repeats),
        wasted_rounds=first.num_wasted_rounds if first else 0,
        metrics=metrics.of_run(first),
    )


def _repeat(result: GenerationResult) -> Repeat:
    return Repeat(
        decode_tokens_per_second=time_metrics.decode_tokens_per_second(result.rounds),
        end_to_end_tokens_per_second=time_metrics.end_to_end_tokens_per_second(result),
        round_ms=time_metrics.round_ms(result.rounds),
        seconds=result.seconds,
        prefill_ms_per_request=time_metrics.prefill_ms_per_request(result.prefills),
    )


def _repeats_identical(repeats: Sequence[GenerationResult]) -> bool | None:
    """Return whether every repeat gave the tokens of the first; None with fewer than two repeats."""
    if len(repeats) < 2:
        return None
    outputs = [{request.request_id: request.output_ids for request in result.requests} for result in repeats]
    return all(output == outputs[0] for output in outputs[1:])


def _graph(repeats: Sequence[GenerationResult]) -> Graph:
    """Return the counts of graphs. The engine never resets them, so those of the last repeat include the warm-up and
    every repeat."""
    if not repeats:
        return Graph(mode=None, captures=0, replays=0, nodes={}, rounds_per_replay=1, no_loop=False)
    counts = repeats[-1].graph
    return Graph(
        mode=counts.mode,
        captures=counts.captures,
        replays=counts.replays,
        nodes=counts.nodes,
        rounds_per_replay=counts.rounds_per_replay,
        no_loop=counts.no_loop,
    )


def _comparison(main: Measured, references: Mapping[str, Measured], metrics: OwnMetrics) -> Comparison:
    return Comparison(
        references={name: _reference(measured, metrics) for name, measured in references.items()},
        speedup=_ratio_over("plain", main, references),
        pruning_speedup=_ratio_over("unpruned", main, references),
        break_even_acceptance_length=_break_even(main, references),
        accuracy_change=answer_metrics.accuracy_change(main.correct, references["plain"].correct, over="plain")
        if "plain" in references
        else None,
    )


def _reference(measured: Measured, metrics: OwnMetrics) -> Reference:
    return {**_speed(measured.repeats, metrics), **_outcome(measured, measured.requests, diverged=None)}


def _ratio_over(name: str, main: Measured, references: Mapping[str, Measured]) -> Ratio | None:
    if name not in references:
        return None
    rates, others = (
        [time_metrics.decode_tokens_per_second(result.rounds) for result in measured.repeats]
        for measured in (main, references[name])
    )
    return time_metrics.paired_ratio(rates, others, over=name)


def _break_even(main: Measured, references: Mapping[str, Measured]) -> float | None:
    """Return the break-even acceptance length; None without drafts or without plain decoding beside them."""
    if "plain" not in references or not any(result.num_draft_tokens for result in main.repeats):
        return None
    pairs = zip(main.repeats, references["plain"].repeats, strict=True)
    return averages.median_over_repeats(
        time_metrics.break_even_acceptance_length(result.rounds, plain.rounds) for result, plain in pairs
    )


def _latency_ms(repeats: Sequence[GenerationResult]) -> LatencyMs:
    requests = [request for result in repeats for request in result.requests]
    return LatencyMs(
        ttft=time_metrics.latency(time_metrics.time_to_first_token_ms(requests)),
        tpot=time_metrics.latency(time_metrics.time_per_output_token_ms(requests)),
        itl=time_metrics.latency(time_metrics.inter_token_latency_ms(requests)),
        e2e=time_metrics.latency(time_metrics.end_to_end_latency_ms(requests)),
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
