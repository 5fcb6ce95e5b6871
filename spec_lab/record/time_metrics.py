"""Computes times of rounds, of their stages and of requests, and compares those of two configurations.

The first paragraph of a function's docstring is the definition of its number (`spec_lab.record.definitions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from spec_lab.record.acceptance_metrics import num_output_tokens
from spec_lab.record.averages import mean, percentile, ratio
from spec_lab.record.schema import Latency, Ratio, Summary

if TYPE_CHECKING:
    from spec_lab.core.results import GenerationResult, PrefillRecord, RequestRecord, RoundRecord


STAGES = ("verify", "accept", "catchup", "recur", "draft", "graph", "commit", "readback", "lookup")
"""The stages of a round. `draft` is catchup and recur in one graph, and `graph` is one whole round or several in one;
their parts cannot be timed separately. `lookup` is work of the host while the device waits."""


def stages_of(results: Sequence[GenerationResult]) -> list[str]:
    """Return the stages of the lab, then those that parts of extensions have timed themselves. The time of an
    extension's stage is also part of the time of the lab's stage that it runs in."""
    seen = dict.fromkeys(name for result in results for record in result.rounds for name in record.stage_seconds)
    return [*STAGES, *(name for name in seen if name not in STAGES)]


DRAFT_STAGES = ("catchup", "recur", "draft", "lookup")
"""The stages that are a drafter's alone."""


def decode_tokens_per_second(rounds: Sequence[RoundRecord]) -> float | None:
    """Tokens emitted in rounds / time of the rounds, each from the reading of the round before; prompt passes are in
    neither. Median over timed repeats.

    `round_ms` says when a round begins and ends.
    """
    return ratio(sum(sum(record.emitted) for record in rounds), sum(record.seconds for record in rounds))


def end_to_end_tokens_per_second(result: GenerationResult) -> float | None:
    """All output tokens / time of the whole call, prompt passes and scheduling included. Median over timed repeats."""
    return ratio(num_output_tokens(result.requests), result.seconds)


def round_ms(rounds: Sequence[RoundRecord]) -> float | None:
    """Mean time of a round in milliseconds, until the host has read its tokens. A round begins when the host has read
    the round before, or, after a prompt pass, with its own launch. Median over repeats.

    So the times add up to the wall time of decoding. With graph.rounds_per_replay the rounds of a replay share its time
    equally, including that of wasted rounds.
    """
    return mean([1e3 * record.seconds for record in rounds])


def launch_ms(rounds: Sequence[RoundRecord]) -> float | None:
    """CPU span: mean time from the host's first call of the launch until it has launched all of a round, before it
    waits for results.

    On a CPU a launch runs the operator, so the span is nearly the whole round. Median over timed repeats.
    """
    return mean([1e3 * record.launch_seconds for record in rounds if record.launch_seconds is not None])


def launched_round_ms(result: GenerationResult) -> float | None:
    """Mean time of a round in milliseconds, including wasted rounds, which keep the GPU as busy as others."""
    total = sum(record.seconds for record in result.rounds)
    return ratio(1e3 * total, len(result.rounds) + result.num_wasted_rounds)


def gpu_idle_share(busy_ms: float | None, launched_round_ms: float | None) -> float | None:
    """1 - `gpu_busy_ms_per_round` / `round_ms`, not under 0; null on a CPU. The busy time is profiled. `round_ms` is
    from the timed passes, and its mean here includes wasted rounds.
    """
    share = None if busy_ms is None or launched_round_ms is None else ratio(busy_ms, launched_round_ms)
    return None if share is None else max(0.0, 1 - share)


def stage_ms(rounds: Sequence[RoundRecord], stage: str) -> float | None:
    """Mean time of a stage in the rounds that could tell it apart; null where none could. Median over timed repeats.

    `commit` is the device's bookkeeping. `readback` packs the results that the host needs and copies them. The rest of
    a round's time is the host's, between stages.
    """
    return mean([1e3 * record.stage_seconds[stage] for record in rounds if stage in record.stage_seconds])


def prefill_ms_per_request(prefills: Sequence[PrefillRecord]) -> float | None:
    """Mean time of a request's prompt pass: all its chunks, the first token, the first drafts. The time of a forward
    over several prompts is divided among them in proportion to their rows. Median over repeats.

    So the times of all requests add up to that of all prompt passes.
    """
    return mean([1e3 * record.seconds for record in prefills])


def time_to_first_token_ms(requests: Iterable[RequestRecord]) -> list[float]:
    """From a request's admission to a slot (waiting for one is not in it) to the token sampled by its prompt pass."""
    return [1e3 * (request.emitted_at[0] - request.admitted_at) for request in requests if request.emitted_at]


def time_per_output_token_ms(requests: Iterable[RequestRecord]) -> list[float]:
    """From a request's first token to its last, divided by the tokens after the first; one value a request."""
    return [
        1e3 * (request.emitted_at[-1] - request.emitted_at[0]) / (len(request.output_ids) - 1)
        for request in requests
        if len(request.output_ids) > 1
    ]


def inter_token_latency_ms(requests: Iterable[RequestRecord]) -> list[float]:
    """Between two deliveries to a request, pooled over requests; a round delivers all its tokens at once."""
    return [
        1e3 * (later - earlier)
        for request in requests
        for earlier, later in zip(request.emitted_at, request.emitted_at[1:], strict=False)
    ]


def end_to_end_latency_ms(requests: Iterable[RequestRecord]) -> list[float]:
    """From a request's admission to a slot to its last token."""
    return [1e3 * (request.emitted_at[-1] - request.admitted_at) for request in requests if request.emitted_at]


def latency(values: Sequence[float]) -> Latency:
    """Mean, median and 99th percentile, over the requests of all timed repeats."""
    return Latency(mean=mean(values), p50=percentile(values, 50), p99=percentile(values, 99))


def paired_ratio(rates: Sequence[float | None], others: Sequence[float | None], over: str) -> Ratio | None:
    """Decode rate over that of the reference named in `over`, paired by repeat: median, lowest and highest."""
    pairs = [(rate, other) for rate, other in zip(rates, others, strict=True) if rate is not None and other]
    if not pairs:
        return None
    ratios = [rate / other for rate, other in pairs]
    return Ratio(value=median(ratios), low=min(ratios), high=max(ratios), over=over)


def break_even_acceptance_length(rounds: Sequence[RoundRecord], plain_rounds: Sequence[RoundRecord]) -> float | None:
    """Time of a request round over that of plain decoding: the acceptance length from which drafting pays.

    At batch 1 this is the time of a round over the time of a plain step; in a batch each time is shared by the requests
    in it. By construction `speedup` of one repeat is `acceptance_length_all / break_even_acceptance_length`.
    """
    times = [ratio(sum(r.seconds for r in part), sum(len(r.emitted) for r in part)) for part in (rounds, plain_rounds)]
    return None if times[0] is None or not times[1] else times[0] / times[1]


def draft_ms(summary: Summary) -> float | None:
    """Return the time of the drafter in a round; None if none of its stages could be timed separately."""
    stages = summary["stage_ms_per_round"]
    known = [value for stage in DRAFT_STAGES if (value := stages.get(stage)) is not None]
    return sum(known) if known else None


def in_plain_steps(summary: Summary, milliseconds: float | None) -> float | None:
    """Return a part of a round's time, in units of a plain step's time; None if one of the times is unknown.

    A round serves a batch. So the part's fraction of the round is multiplied by the cost of a request round.
    """
    break_even, round_ms = summary["break_even_acceptance_length"], summary["round_ms"]
    return milliseconds * break_even / round_ms if milliseconds is not None and break_even and round_ms else None
