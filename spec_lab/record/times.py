"""Times of rounds, of their stages and of requests, rates, and the ratios to the references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from spec_lab.record.metric import Measured, mean_of, median_of, metric, ratio
from spec_lab.record.statistics import mean_ratio, ratios_of_turns
from spec_lab.record.trace import union

if TYPE_CHECKING:
    from spec_lab.core.results import GenerationResult, RoundRecord

STAGES = ("verify", "accept", "catchup", "recur", "draft", "graph", "commit", "readback", "lookup")
"""The stages of a round. `draft` is catchup and recur in one graph, and `graph` is one whole round or several in one;
their parts cannot be timed separately. `lookup` is work of the host while the device waits. Parts of extensions may add
stages, whose time is also in that of the stage that they run in."""


@metric("decode_tokens_per_second", "tokens/s", per="turn")
def decode_tokens_per_second(turn: GenerationResult) -> float | None:
    """Tokens emitted in rounds / time of the rounds, each from the reading of the round before; prompt passes are in
    neither. Median over timed repeats. Of an engine that does not time its rounds: tokens after the first of each
    request / time in which some request was between its first token and its last.

    `round_ms` says when a round begins and ends.
    """
    if turn.rounds:
        return decode_rate(turn.rounds)
    timed = [request for request in turn.requests if request.emitted_at]
    spans = union((request.emitted_at[0], request.emitted_at[-1]) for request in timed)
    return ratio(sum(len(request.output_ids) - 1 for request in timed), sum(end - start for start, end in spans))


def decode_rate(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the tokens a second of some rounds."""
    return ratio(sum(sum(record.emitted) for record in rounds), sum(record.seconds for record in rounds))


@metric("batch_tokens_per_second", "tokens/s", per="requests", inside=True)
def batch_tokens_per_second(measured: Measured) -> float | None:
    """Decode rate of a batch of such requests: their tokens in rounds / time of these rounds, of which each request has
    an equal share. Median over timed repeats."""
    ids = {request.id for request in measured.requests}

    def rate(turn: GenerationResult) -> float | None:
        tokens, seconds = 0, 0.0
        for record in turn.rounds:
            own = [count for name, count in zip(record.request_ids, record.emitted, strict=True) if name in ids]
            tokens += sum(own)
            seconds += record.seconds * len(own) / max(len(record.emitted), 1)
        return ratio(tokens, seconds)

    return median_of(map(rate, measured.repeats))


@metric("end_to_end_tokens_per_second", "tokens/s", per="turn")
def end_to_end_tokens_per_second(turn: GenerationResult) -> float | None:
    """All output tokens / time of the whole call, prompt passes and scheduling included: vLLM's output token
    throughput. Median over timed repeats."""
    return ratio(sum(len(request.output_ids) for request in turn.requests), turn.seconds)


@metric("total_tokens_per_second", "tokens/s", per="turn")
def total_tokens_per_second(turn: GenerationResult) -> float | None:
    """Prompt and output tokens / time of the whole call: vLLM's total token throughput. Median over timed repeats."""
    return ratio(sum(len(r.prompt_ids) + len(r.output_ids) for r in turn.requests), turn.seconds)


@metric("requests_per_second", "requests/s", per="turn")
def requests_per_second(turn: GenerationResult) -> float | None:
    """Requests / time of the whole call: vLLM's request throughput. Median over timed repeats."""
    return ratio(len(turn.requests), turn.seconds)


@metric("requests_in_flight", "requests", per="turn")
def requests_in_flight(turn: GenerationResult) -> float | None:
    """Mean number of requests that have arrived and not ended: the sum of their times from arrival to the last token,
    over the time of the whole call. Median over timed repeats."""
    timed = [request for request in turn.requests if request.emitted_at]
    return ratio(sum(r.emitted_at[-1] - r.arrived_at for r in timed), turn.seconds) if timed else None


@metric("seconds", "s", per="turn")
def seconds(turn: GenerationResult) -> float | None:
    """Wall time of a timed pass over the workload. Median over timed repeats."""
    return turn.seconds


@metric("round_ms", "ms", per="turn")
def round_ms(turn: GenerationResult) -> float | None:
    """Mean time of a round in milliseconds, until the host has read its tokens. A round begins when the host has read
    the round before, or, after a prompt pass, with its own launch. Median over repeats.

    So the times add up to the wall time of decoding. With graph.rounds_per_replay the rounds of a replay share its time
    equally, including that of wasted rounds.
    """
    return mean_of(1e3 * record.seconds for record in turn.rounds)


@metric("launch_ms", "ms", per="turn")
def launch_ms(turn: GenerationResult) -> float | None:
    """CPU span: mean time from the host's first call of the launch until it has launched all of a round, before it
    waits for results.

    On a CPU a launch runs the operator, so the span is nearly the whole round. Median over timed repeats.
    """
    return mean_of(1e3 * r.launch_seconds for r in turn.rounds if r.launch_seconds is not None)


@metric("stage_ms_per_round", "ms", per="turn")
def stage_ms(turn: GenerationResult) -> dict[str, float | None]:
    """Mean time of a stage in the rounds that could tell it apart; null where none could. Median over timed repeats.
    commit is the device's bookkeeping; readback packs the results that the host needs and copies them; lookup is the
    host's search for drafts while the device waits. The rest of a round's time is the host's, between stages."""
    stages = dict.fromkeys((*STAGES, *(name for record in turn.rounds for name in record.stage_seconds)))
    return {
        stage: mean_of(1e3 * r.stage_seconds[stage] for r in turn.rounds if stage in r.stage_seconds)
        for stage in stages
    }


@metric("prefill_ms_per_request", "ms", per="turn")
def prefill_ms_per_request(turn: GenerationResult) -> float | None:
    """Mean time of a request's prompt pass: all its chunks, the first token, the first drafts. The time of a forward
    over several prompts is divided among them in proportion to their rows. Median over repeats.

    So the times of all requests add up to that of all prompt passes.
    """
    return mean_of(1e3 * record.seconds for record in turn.prefills)


@metric("prompt_tokens_per_second", "tokens/s", per="turn")
def prompt_tokens_per_second(turn: GenerationResult) -> float | None:
    """Prompt tokens / time of all prompt passes. Median over repeats."""
    tokens = sum(record.num_prompt_tokens for record in turn.prefills)
    return ratio(tokens, sum(record.seconds for record in turn.prefills))


@metric("prompt_forwards", inside=True)
def prompt_forwards(measured: Measured) -> int:
    """Forwards of the target over prompts in a repeat, each over chunks of one request or of several
    (cache.prefill_tokens)."""
    return measured.first.num_prompt_forwards


@metric("verify_calls", inside=True)
def verify_calls(measured: Measured) -> int:
    """Rounds: target verifies, each of which serves a batch of requests; surplus rounds count. A surplus round was
    launched, under graph.overlap, before the host knew that the round before had ended all its requests: it emits
    nothing, and its time and its rows count."""
    return len(measured.first.rounds)


@metric("wasted_rounds", inside=True)
def wasted_rounds(measured: Measured) -> int:
    """Rounds that graph.rounds_per_replay had launched together with others, and that ran when all their requests had
    ended. They have no line and no rows, and their time is in that of the others. Of the first repeat."""
    return measured.first.num_wasted_rounds


@metric("repeats_identical")
def repeats_identical(measured: Measured) -> bool | None:
    """Whether every repeat gave the tokens of the first; null with fewer than two."""
    outputs = [[request.output_ids for request in result.requests] for result in measured.repeats]
    return None if len(outputs) < 2 else all(output == outputs[0] for output in outputs[1:])


@metric("latency_ms", "ms")
def latency_ms(measured: Measured) -> dict[str, dict[str, float | None]]:
    """Mean, median and 99th percentile, over the requests of all timed repeats, of ttft: from a request's arrival (the
    time in a queue is in it) to its first token; tpot: from its first token to its last, divided by the tokens after
    the first; itl: between two deliveries to a request, pooled over requests (a round delivers all its tokens at once);
    e2e: from a request's arrival to its last token."""
    timed = [request for result in measured.repeats for request in result.requests if request.emitted_at]
    several = [request for request in timed if len(request.output_ids) > 1]
    wholly = [request for request in timed if len(request.emitted_at) == 1 + len(request.emitted_per_round)]
    return {
        "ttft": _spread([r.emitted_at[0] - r.arrived_at for r in timed]),
        "tpot": _spread([(r.emitted_at[-1] - r.emitted_at[0]) / (len(r.output_ids) - 1) for r in several]),
        "itl": _spread([later - earlier for r in wholly for earlier, later in pairwise(r.emitted_at)]),
        "e2e": _spread([r.emitted_at[-1] - r.arrived_at for r in timed]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    import numpy as np

    if not seconds:
        return dict.fromkeys(("mean", "p50", "p99"))
    median_, highest = 1e3 * np.percentile(seconds, (50, 99))
    return {"mean": 1e3 * fmean(seconds), "p50": float(median_), "p99": float(highest)}


@metric("graph", inside=True)
def graph(measured: Measured) -> dict[str, Any]:
    """Captures and replays since the engine was made, warm-up included; on a GPU each graph of a round is captured
    twice, and the two are replayed in turn. nodes: kernels, copies and fills of each segment's graph, on a CPU
    operators; of the last one captured. rounds_per_replay: rounds that one graph holds, where it holds whole ones;
    else 1. no_loop: the drafter has no draft loop, so that no mode captures one: drafts are looked up."""
    counts = asdict(measured.repeats[-1].graph)  # never reset, so those of the last repeat hold all
    return {name: count for name, count in counts.items() if name != "mode"}


@metric("launches_per_round")
def launches_per_round(measured: Measured) -> float | None:
    """Device work the host submits in a round: kernels, copies, fills and graph launches of the profiled rounds; on a
    CPU operators called from Python that compute or write, and replays."""
    return measured.work.get("launches_per_round")


@metric("replays_per_round")
def replays_per_round(measured: Measured) -> float | None:
    """Graph replays a round, in the same rounds."""
    return measured.work.get("replays_per_round")


@metric("host_syncs_per_round")
def host_syncs_per_round(measured: Measured) -> float | None:
    """Calls in which the host waits for the GPU (stream, event, device, blocking copy), in the same rounds; on a CPU
    reads of a tensor's value, where it would wait."""
    return measured.work.get("host_syncs_per_round")


@metric("gpu_busy_ms_per_round", "ms")
def gpu_busy_ms_per_round(measured: Measured) -> float | None:
    """Time in which the GPU runs at least one kernel, copy or fill, in the same rounds."""
    return measured.work.get("gpu_busy_ms_per_round")


@metric("gpu_idle_share", "share")
def gpu_idle_share(measured: Measured) -> float | None:
    """1 - `gpu_busy_ms_per_round` / `round_ms`, not under 0; null on a CPU. The busy time is profiled. `round_ms` is
    from the timed passes, and its mean here includes wasted rounds."""
    times = (
        ratio(1e3 * sum(r.seconds for r in result.rounds), len(result.rounds) + result.num_wasted_rounds)
        for result in measured.repeats
    )
    share = ratio(gpu_busy_ms_per_round(measured), median_of(times))
    return None if share is None else max(0.0, 1 - share)


@metric("memory", "bytes")
def memory(measured: Measured) -> dict[str, float | None]:
    """Memory of the process (RSS) when nothing of the run was loaded, and at most; on a GPU also what torch had
    allocated there at most."""
    names = ("start_rss_bytes", "peak_rss_bytes", "peak_cuda_bytes")
    return {name: measured.work[name] for name in names if name in measured.work}


@metric("speedup", "times")
def speedup(measured: Measured) -> dict[str, float | None] | None:
    """Decode rate over that of plain decoding, paired by repeat: median, lowest and highest; mean: the geometric mean,
    with its 95 % t interval from three turns on."""
    return _ratio_over("plain", measured)


@metric("pruning_speedup", "times")
def pruning_speedup(measured: Measured) -> dict[str, float | None] | None:
    """The same over the reference without pruning: what pruning saved."""
    return _ratio_over("unpruned", measured)


@metric("capture_speedup", "times")
def capture_speedup(measured: Measured) -> dict[str, float | None] | None:
    """The same over the reference without captured graphs."""
    return _ratio_over("eager", measured)


def _ratio_over(name: str, measured: Measured) -> dict[str, float | None] | None:
    reference = measured.references.get(name)
    if reference is None:
        return None
    sides = ([decode_tokens_per_second(turn) for turn in each.repeats] for each in (measured, reference))
    ratios = ratios_of_turns(*sides)
    mean = mean_ratio(ratios)
    if mean is None:
        return None
    return {
        "value": median(ratios), "low": min(ratios), "high": max(ratios),
        "mean": mean.value, "mean_low": mean.low, "mean_high": mean.high,
    }  # fmt: skip


@metric("break_even_acceptance_length", "tokens a round")
def break_even_acceptance_length(measured: Measured) -> float | None:
    """Time of a request round over that of plain decoding: the acceptance length from which drafting pays.

    At batch 1 this is the time of a round over the time of a plain step; in a batch each time is shared by the requests
    in it. By construction `speedup` of one repeat is `acceptance_length_all / break_even_acceptance_length`.
    """
    plain = measured.references.get("plain")
    if plain is None or not measured.num_draft_tokens:
        return None
    pairs = zip(measured.repeats, plain.repeats, strict=True)
    return median_of(ratio(_request_round_seconds(mine), _request_round_seconds(other)) for mine, other in pairs)


def _request_round_seconds(turn: GenerationResult) -> float | None:
    return ratio(sum(record.seconds for record in turn.rounds), sum(len(record.emitted) for record in turn.rounds))
