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

from spec_lab.record.schema import Accuracy, AccuracyChange, Latency, PositionRates, Ratio, Relaxed, Rows, Thinking

if TYPE_CHECKING:
    from spec_lab.core.types import GenerationResult, PrefillRecord, RequestRecord, RoundRecord

STAGES = ("verify", "accept", "catchup", "recur", "draft", "graph", "commit")
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


def acceptance_length(requests: Iterable[RequestRecord]) -> float | None:
    """Emitted tokens / request rounds, pooled over requests; the prompt pass's token and rounds cut short left out.

    A round cut short by EOS or a limit says where the text ended, not what the drafter was worth. Other tools count
    otherwise: dividing all output tokens by verifies counts the prompt pass's token as well.
    """
    emitted = [n for _, n in _complete_rounds(requests)]
    return _mean(emitted)


def acceptance_length_all(requests: Sequence[RequestRecord]) -> float | None:
    """Emitted tokens / request rounds, pooled, with the rounds that EOS or a limit cut short."""
    return _ratio(num_emitted_tokens(requests), num_request_rounds(requests))


def acceptance_rate_by_position(requests: Iterable[RequestRecord], num_draft_tokens: int) -> PositionRates:
    """Share of draft tokens accepted at each draft position, in rounds not cut short.

    `unconditional` is over all those rounds, so that 1 + its sum is `acceptance_length`. `conditional` is over the
    drafts that reached the position, every earlier draft of the round being accepted; their number is `reached`.
    """
    accepted = [m for m, _ in _complete_rounds(requests)]
    reached = [sum(m >= position for m in accepted) for position in range(num_draft_tokens + 1)]
    passed = reached[1:]
    return PositionRates(
        unconditional=[_ratio(count, len(accepted)) for count in passed],
        conditional=[_ratio(count, before) for count, before in zip(passed, reached[:-1], strict=True)],
        reached=reached[:-1],
    )


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
    """Mean time of a round, from verify to commit, in milliseconds. Median over timed repeats."""
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
    """Mean time of a stage in the rounds that could tell it apart; null where none could. Median over timed repeats."""
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


def _complete_rounds(requests: Iterable[RequestRecord]) -> list[tuple[int, int]]:
    """(accepted, emitted) of the rounds that neither EOS nor a limit cut: only a request's last one can be cut."""
    complete: list[tuple[int, int]] = []
    for request in requests:
        pairs = list(zip(request.accepted_per_round, request.emitted_per_round, strict=True))
        complete += pairs[:-1] if request.truncated else pairs
    return complete


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
    "acceptance_rate_by_position.unconditional": "Over all rounds not cut short; 1 + their sum is acceptance_length.",
    "acceptance_rate_by_position.conditional": "Over the drafts that reached the position.",
    "acceptance_rate_by_position.reached": "Drafts that reached the position: every earlier one was accepted.",
    "accepted_histogram": _first_paragraph(accepted_histogram),
    "emitted_histogram": _first_paragraph(emitted_histogram),
    "num_draft_tokens": "K: draft tokens verified in a round.",
    "num_requests": "Requests of the workload.",
    "rounds": _first_paragraph(num_request_rounds),
    "verify_calls": "Rounds: target verifies, each of which serves a batch of requests.",
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
    "prefill_ms_per_request": _first_paragraph(prefill_ms_per_request),
    "latency_ms": _first_paragraph(latency),
    "latency_ms.ttft": _first_paragraph(time_to_first_token_ms),
    "latency_ms.tpot": _first_paragraph(time_per_output_token_ms),
    "latency_ms.itl": _first_paragraph(inter_token_latency_ms),
    "latency_ms.e2e": _first_paragraph(end_to_end_latency_ms),
    "rows": _first_paragraph(rows),
    "rows.catchup_computed": (
        "Rows the passes of the drafter's catch-up step carried past the KV write; mtp_vanilla has a pass for each "
        "draft, the others one."
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
"""What each number of `summary.json` means, by its key; a longer key is the more exact one."""
