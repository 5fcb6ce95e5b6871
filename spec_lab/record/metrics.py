"""The definition of every number a run reports. Pure functions; the first paragraph of a docstring is the definition.

Two words matter here. A *round* is one target verify, which serves several requests at once. A *request round* is the
part one request has in it. Everything about acceptance counts request rounds; everything about time counts rounds.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import NormalDist, median
from typing import TYPE_CHECKING

from spec_lab.record.draft_counts import DraftCounts
from spec_lab.record.schema import Accuracy, AccuracyChange, Latency, PositionRates, Ratio, Relaxed, Rows, Thinking

if TYPE_CHECKING:
    from spec_lab.core.types import GenerationResult, PrefillRecord, RequestRecord, RoundRecord

STAGES = ("verify", "accept", "catchup", "recur", "draft", "graph", "commit", "readback")
"""`draft` is catchup and recur in one graph, `graph` a whole round in one, where the spans inside cannot be timed."""


def num_request_rounds(requests: Iterable[RequestRecord]) -> int:
    """Request rounds: how many times a request took part in a target verify; those cut short count."""
    return sum(len(request.emitted_per_round) for request in requests)


def num_emitted_tokens(requests: Iterable[RequestRecord]) -> int:
    """Tokens emitted in rounds, after any cut by EOS or a limit; the token sampled by the prompt pass is not one."""
    return sum(sum(request.emitted_per_round) for request in requests)


def num_output_tokens(requests: Iterable[RequestRecord]) -> int:
    """All tokens given to the user, the one sampled by the prompt pass included."""
    return sum(len(request.output_ids) for request in requests)


def acceptance_length(requests: Iterable[RequestRecord], num_draft_tokens: int) -> float | None:
    """Tokens a request round would go on to emit in a text that does not end: 1 + the sum of the unconditional
    acceptance rates, pooled over requests. A round cut by a limit counts as it was judged, before the cut. Drafts
    behind an end of sequence do not count, neither as accepted nor as rejected: there is no text to judge them by.
    Where no round was cut by an end of sequence this is judged tokens / request rounds. vLLM's mean acceptance length,
    1 + accepted drafts / rounds, also counts the drafts behind an end of sequence, nearly all of them rejected, and so
    is lower; it is 1 + the mean of `accepted_histogram`. The prompt pass's token is in neither.

    Why: `spec_lab/record/draft_counts.py`. Leaving out the rounds cut short, as schema versions 1 and 2 did, is biased
    low, since the long rounds are the ones that get cut. Dividing all output tokens by verifies, as other tools do,
    counts the prompt pass's token as well.
    """
    return draft_counts(requests, num_draft_tokens).acceptance_length


def acceptance_length_all(requests: Sequence[RequestRecord]) -> float | None:
    """Really emitted tokens / request rounds, pooled: rounds cut short count as they were cut. What speed rests on."""
    return _ratio(num_emitted_tokens(requests), num_request_rounds(requests))


def acceptance_rate_by_position(requests: Iterable[RequestRecord], num_draft_tokens: int) -> PositionRates:
    """Share of draft tokens accepted at each draft position. Drafts behind an end of sequence do not count.

    `conditional` is over the drafts that reached the position, every earlier draft of the round being accepted; their
    number is `reached`. `unconditional` is the product of the conditional ones up to the position, the share of all
    rounds, so that 1 + its sum is `acceptance_length`.
    """
    counts = draft_counts(requests, num_draft_tokens)
    return PositionRates(
        unconditional=counts.unconditional, conditional=counts.conditional, reached=list(counts.reached)
    )


def draft_counts(requests: Iterable[RequestRecord], num_draft_tokens: int) -> DraftCounts:
    """Drafts reached and accepted at each position, pooled over requests."""
    rounds = (
        pair for request in requests for pair in zip(request.accepted_per_round, request.judged_per_round, strict=True)
    )
    return DraftCounts.of(rounds, num_draft_tokens)


def accepted_histogram(requests: Iterable[RequestRecord], num_draft_tokens: int) -> list[int]:
    """Request rounds by number of accepted draft tokens (index 0 to K), before any cut."""
    counts = Counter(m for request in requests for m in request.accepted_per_round)
    return [counts[m] for m in range(num_draft_tokens + 1)]


def emitted_histogram(requests: Iterable[RequestRecord], num_draft_tokens: int) -> list[int]:
    """Request rounds by number of emitted tokens (index 0 to K + 1), after any cut."""
    counts = Counter(n for request in requests for n in request.emitted_per_round)
    return [counts[n] for n in range(num_draft_tokens + 2)]


def decode_tokens_per_second(rounds: Sequence[RoundRecord]) -> float | None:
    """Tokens emitted in rounds / time of the rounds; prompt passes are in neither. Median over timed repeats."""
    return _ratio(sum(sum(record.emitted) for record in rounds), sum(record.seconds for record in rounds))


def end_to_end_tokens_per_second(result: GenerationResult) -> float | None:
    """All output tokens / time of the whole call, prompt passes and scheduling included. Median over timed repeats."""
    return _ratio(num_output_tokens(result.requests), result.seconds)


def round_ms(rounds: Sequence[RoundRecord]) -> float | None:
    """Mean time of a round in milliseconds, from its launch until the host has read its tokens. Median over repeats.

    With graph.overlap from the reading of the round before, if that came later: the times add up to the wall time of
    decoding.
    """
    return _mean([1e3 * record.seconds for record in rounds])


def launch_ms(rounds: Sequence[RoundRecord]) -> float | None:
    """CPU span: mean time from the start of a round until the host has launched all of it, before it waits for results.

    On a CPU an operator has run once it is launched, so the span is nearly the round. Median over timed repeats.
    """
    return _mean([1e3 * record.launch_seconds for record in rounds if record.launch_seconds is not None])


def gpu_idle_share(busy_ms: float | None, round_ms: float | None) -> float | None:
    """1 - `gpu_busy_ms_per_round` / `round_ms`, not under 0; null on a CPU. Busy time is profiled, `round_ms` timed."""
    share = None if busy_ms is None or round_ms is None else _ratio(busy_ms, round_ms)
    return None if share is None else max(0.0, 1 - share)


def stage_ms(rounds: Sequence[RoundRecord], stage: str) -> float | None:
    """Mean time of a stage in the rounds that could tell it apart; null where none could. Median over timed repeats.

    `commit` is the device's bookkeeping, `readback` packs what the host is to know and copies it. What a round takes
    beyond its stages is the host's time between them.
    """
    return _mean([1e3 * record.stage_seconds[stage] for record in rounds if stage in record.stage_seconds])


def prefill_ms_per_request(prefills: Sequence[PrefillRecord]) -> float | None:
    """Mean time of a request's prompt pass: all its chunks, the first token, the first drafts. Median over repeats."""
    return _mean([1e3 * record.seconds for record in prefills])


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
    return Latency(mean=_mean(values), p50=percentile(values, 50), p99=percentile(values, 99))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` % of the values lie, interpolated linearly between the two nearest."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def rows(rounds: Iterable[RoundRecord], prefills: Iterable[PrefillRecord]) -> Rows:
    """Rows that went on past the KV write in one pass over the workload."""
    total = Rows(catchup_computed=0, catchup_live=0, prefill_hidden=0, prefill_logits=0)
    for counts in [*(record.rows for record in rounds), *(record.rows for record in prefills)]:
        total["catchup_computed"] += counts.catchup_computed
        total["catchup_live"] += counts.catchup_live
        total["prefill_hidden"] += counts.prefill_hidden
        total["prefill_logits"] += counts.prefill_logits
    return total


def accuracy(correct: Iterable[bool | None]) -> Accuracy:
    """Share of right answers among the n requests whose answer a program can check, with its 95 % Wilson interval."""
    checked = [value for value in correct if value is not None]
    if not checked:
        return Accuracy(value=None, low=None, high=None, n=0)
    low, high = wilson_interval(sum(checked), len(checked))
    return Accuracy(value=sum(checked) / len(checked), low=low, high=high, n=len(checked))


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927): stays inside 0 to 1 and holds near both ends."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def accuracy_change(
    correct: Mapping[str, bool | None], reference: Mapping[str, bool | None], over: str
) -> AccuracyChange | None:
    """Right answers gained less those lost against the reference named in `over`, over the n prompts checked in both.

    Paired by prompt; the 95 % interval is `paired_difference_interval`. None where no prompt was checked in both.
    """
    pairs = [
        (answer, reference[request_id])
        for request_id, answer in correct.items()
        if answer is not None and reference.get(request_id) is not None
    ]
    if not pairs:
        return None
    lost = sum(other is True and not answer for answer, other in pairs)
    gained = sum(answer and not other for answer, other in pairs)
    low, high = paired_difference_interval(lost, gained, len(pairs))
    difference = (gained - lost) / len(pairs)
    return AccuracyChange(over=over, n=len(pairs), lost=lost, gained=gained, difference=difference, low=low, high=high)


def paired_difference_interval(lost: int, gained: int, num_pairs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a difference of paired proportions: Wald's with half a pair added to each cell (Agresti, Min 2005).

    Unlike Wald's own it keeps a width where no pair differs.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    lost_adjusted, gained_adjusted, total = lost + 0.5, gained + 0.5, num_pairs + 2
    change = (gained_adjusted - lost_adjusted) / total
    spread = z * (lost_adjusted + gained_adjusted - total * change * change) ** 0.5 / total
    return max(-1.0, change - spread), min(1.0, change + spread)


def relaxed_hits(requests: Collection[RequestRecord], rounds: Iterable[RoundRecord]) -> Relaxed | None:
    """Accepted drafts that were not the target's argmax, before any cut; null for a rule that never relaxes.

    Per 1000 tokens: of those emitted in rounds.
    """
    ids = {request.request_id for request in requests}
    hits = [
        count
        for record in rounds
        if record.relaxed is not None
        for request_id, count in zip(record.request_ids, record.relaxed, strict=True)
        if request_id in ids
    ]
    if not hits:
        return None
    rate = _ratio(1000 * sum(hits), num_emitted_tokens(requests))
    return Relaxed(hits=sum(hits), per_1000_tokens=rate)


def thinking(requests: Sequence[RequestRecord], num_thinking_tokens: Mapping[str, int] | None) -> Thinking | None:
    """Output tokens inside thinking, the markers not counted: mean of a request, and share of all output tokens.

    Thinking left open when the output was cut counts as far as it went. Null where the tokenizer has no markers.
    """
    if num_thinking_tokens is None:
        return None
    counts = [num_thinking_tokens[request.request_id] for request in requests]
    return Thinking(mean_tokens=_mean(counts), share=_ratio(sum(counts), num_output_tokens(requests)))


def equal_share(requests: Sequence[RequestRecord], diverged: Collection[str] | None) -> float | None:
    """Share of outputs equal to plain decoding's token by token; null where the two were not compared."""
    if diverged is None:
        return None
    return _ratio(sum(request.request_id not in diverged for request in requests), len(requests))


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
    times = [_ratio(sum(r.seconds for r in part), sum(len(r.emitted) for r in part)) for part in (rounds, plain_rounds)]
    return None if times[0] is None or not times[1] else times[0] / times[1]


def median_over_repeats(values: Iterable[float | None]) -> float | None:
    """The middle value of those repeats that have one."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _first_paragraph(function: Callable[..., object]) -> str:
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


DEFINITIONS: dict[str, str] = {
    "acceptance_length": _first_paragraph(acceptance_length),
    "acceptance_length_all": _first_paragraph(acceptance_length_all),
    "acceptance_rate_by_position": _first_paragraph(acceptance_rate_by_position),
    "acceptance_rate_by_position.unconditional": (
        "Share of all rounds, the product of the conditional rates up to the position; 1 + their sum is "
        "acceptance_length."
    ),
    "acceptance_rate_by_position.conditional": "Over the drafts that reached the position.",
    "acceptance_rate_by_position.reached": (
        "Drafts that reached the position: every earlier one was accepted, and none was an end of sequence."
    ),
    "accepted_histogram": _first_paragraph(accepted_histogram),
    "emitted_histogram": _first_paragraph(emitted_histogram),
    "num_draft_tokens": "K: draft tokens verified in a round.",
    "num_requests": "Requests of the workload.",
    "rounds": _first_paragraph(num_request_rounds),
    "verify_calls": (
        "Rounds: target verifies, each of which serves a batch of requests; surplus rounds count. A surplus round was "
        "launched, under graph.overlap, before the host knew that the round before had ended all its requests: it "
        "emits nothing, and its time and its rows count."
    ),
    "emitted_tokens": _first_paragraph(num_emitted_tokens),
    "output_tokens": _first_paragraph(num_output_tokens),
    "decode_tokens_per_second": _first_paragraph(decode_tokens_per_second),
    "end_to_end_tokens_per_second": _first_paragraph(end_to_end_tokens_per_second),
    "speedup": _first_paragraph(paired_ratio),
    "pruning_speedup": "The same over the reference without pruning: what pruning saved.",
    "break_even_acceptance_length": _first_paragraph(break_even_acceptance_length),
    "round_ms": _first_paragraph(round_ms),
    "launch_ms": _first_paragraph(launch_ms),
    "stage_ms_per_round": _first_paragraph(stage_ms),
    "stage_ms_per_round.commit": "The device's bookkeeping; the host's reading is readback.",
    "stage_ms_per_round.readback": "The tokens and counts packed into one tensor and read by the host.",
    "prefill_ms_per_request": _first_paragraph(prefill_ms_per_request),
    "latency_ms": _first_paragraph(latency),
    "latency_ms.ttft": _first_paragraph(time_to_first_token_ms),
    "latency_ms.tpot": _first_paragraph(time_per_output_token_ms),
    "latency_ms.itl": _first_paragraph(inter_token_latency_ms),
    "latency_ms.e2e": _first_paragraph(end_to_end_latency_ms),
    "rows": _first_paragraph(rows),
    "rows.catchup_computed": (
        "Rows the passes of the drafter's catch-up step carried past the KV write, padded and surplus rows included; "
        "mtp_vanilla has a pass for each draft, the others one."
    ),
    "rows.catchup_live": "Rows of these passes whose output anybody reads: one an active request and pass.",
    "rows.prefill_hidden": "Prompt rows for which the target handed features to the drafter.",
    "rows.prefill_logits": "Prompt rows for which the target computed logits.",
    "graph": "Captures, replays and fallbacks to eager since the engine was made, warm-up included.",
    "graph.nodes": "Kernels, copies and fills of each segment's graph, on a CPU operators; of the last one captured.",
    "launches_per_round": (
        "Device work the host submits in a round: kernels, copies, fills and graph launches of the profiled rounds; on "
        "a CPU operators called from Python that compute or write, and replays."
    ),
    "replays_per_round": "Graph replays a round, in the same rounds.",
    "host_syncs_per_round": (
        "Calls in which the host waits for the GPU (stream, event, device, blocking copy), in the same rounds; on a "
        "CPU reads of a tensor's value, where it would wait."
    ),
    "gpu_busy_ms_per_round": "Time in which the GPU runs at least one kernel, copy or fill, in the same rounds.",
    "gpu_idle_share": _first_paragraph(gpu_idle_share),
    "kernels": "Calls and device time of each kernel a round, profiled outside the timed part.",
    "accuracy": _first_paragraph(accuracy),
    "accuracy_change": _first_paragraph(accuracy_change),
    "relaxed": _first_paragraph(relaxed_hits),
    "relaxed.per_1000_tokens": "Of the tokens emitted in rounds.",
    "thinking": _first_paragraph(thinking),
    "equal_to_plain": _first_paragraph(equal_share),
    "divergence": "Requests compared with plain decoding token by token, and how many differ.",
    "divergence.near_ties": "First different where plain decoding's two best logits are closer than the tolerance.",
    "divergence.bugs": "First different where they are not, under a rule that must be lossless.",
    "divergence.lossy": "Differ under a rule that may.",
    "divergence.median_index": "Median index of the first token that differs, over the requests that do.",
    "divergence.median_margin": "Median of plain decoding's own top-2 logit difference there.",
    "seconds": "Wall time: in a repeat the timed pass, at the top the whole run.",
    "num_threads": "Threads torch used on the CPU.",
    "schema_version": "Version of this record's layout.",
}
"""This says what each number of `summary.json` means, by its key; a longer key is the more exact one."""
