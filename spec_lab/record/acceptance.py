"""Counts tokens, drafts and rows: how many were accepted, and how many were computed.

Two words matter here. A *round* is one target verify, which serves a batch of requests at once. A *request round* is
the part one request has in it. Acceptance is counted over request rounds, and times are means over rounds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import stdev
from typing import TYPE_CHECKING, Any

from spec_lab.core.results import RowCounts
from spec_lab.record.draft_counts import DraftCounts, RoundTotals, draft_counts, round_totals, rounds_of
from spec_lab.record.metric import Measured, metric, ratio
from spec_lab.record.statistics import Z, bootstrapped, lengths

if TYPE_CHECKING:
    import numpy as np

    from spec_lab.core.results import ExpertCounts
    from spec_lab.record.models import Request


@metric("num_requests", per="requests")
def num_requests(measured: Measured) -> int:
    """Requests of the workload."""
    return len(measured.requests)


@metric("rounds", per="requests")
def num_request_rounds(measured: Measured) -> int | None:
    """Request rounds: how many times a request took part in a target verify; rounds cut short count. Null if the engine
    does not tell."""
    if not measured.tells("accepted_per_round") and not measured.tells("rounds_histogram"):
        return None
    return sum(1 for request in measured.requests for _ in rounds_of(request))


@metric("emitted_tokens", "tokens", per="requests")
def num_emitted_tokens(measured: Measured) -> int | None:
    """Tokens emitted in rounds, after any cut by EOS or a limit; the token sampled by the prompt pass is not
    counted."""
    if not measured.tells("emitted_per_round"):
        return None
    return sum(sum(request.emitted_per_round or ()) for request in measured.requests)


@metric("output_tokens", "tokens", per="requests")
def num_output_tokens(measured: Measured) -> int:
    """All tokens given to the user, the one sampled by the prompt pass included."""
    return sum(len(request.output_ids) for request in measured.requests)


@metric("prompt_tokens", "tokens", per="requests")
def num_prompt_tokens(measured: Measured) -> int:
    """Tokens of the prompts."""
    return sum(len(request.prompt_ids) for request in measured.requests)


@metric("acceptance_length", "tokens a round", per="requests")
def acceptance_length(measured: Measured) -> dict[str, float | None] | None:
    """Tokens a request round would go on to emit in a text that does not end: 1 + the sum of the unconditional
    acceptance rates, pooled over requests; low and high: 95 % bootstrap over prompts. A round cut by a limit counts as
    it was judged, before the cut. Drafts behind an end of sequence do not count, neither as accepted nor as rejected:
    there is no text to judge them by. Where no round was cut by an end of sequence this is judged tokens / request
    rounds. vLLM's mean acceptance length, 1 + accepted drafts / rounds, also counts the drafts behind an end of
    sequence, nearly all of them rejected, and so is lower; it is 1 + the mean of `accepted_histogram`. The prompt
    pass's token is in neither.

    The reasons are in `spec_lab/record/draft_counts.py`. A round that offers fewer than K drafts accepts none at later
    positions, and counts with the tokens that it gives.
    """
    if not measured.num_draft_tokens:
        return None
    pooled = draft_counts(measured.requests, measured.num_draft_tokens).acceptance_length
    return _interval(counts_by_request(measured.requests, measured.num_draft_tokens)) | {"value": pooled}


def _interval(counts: np.ndarray[Any, Any]) -> dict[str, float | None]:
    return asdict(bootstrapped(lambda picks: lengths(counts[picks]), len(counts)))


def counts_by_request(requests: Sequence[Request], num_draft_tokens: int) -> np.ndarray[Any, Any]:
    """Return [requests, 2, K]: drafts reached and accepted at each position."""
    import numpy as np

    each = [draft_counts([request], num_draft_tokens) for request in requests]
    return np.array([[part.reached, part.accepted] for part in each], dtype=np.int64)


@metric("common_length", "tokens a round", per="requests")
def common_length(measured: Measured) -> dict[str, float | None] | None:
    """Acceptance length as every engine can count it: 1 + accepted drafts / rounds, as judged, over the request rounds
    that offered a draft, pooled; low and high: 95 % bootstrap over prompts, null where an engine tells totals alone.
    Null for the lab's drafter=ngram, of which nobody counts the rounds that found nothing.

    Drafts behind an end of sequence count, nearly all of them rejected. So it is a little lower than
    `acceptance_length`.
    """
    totals = _common(measured)
    if totals is None:
        return None
    return _interval(common_counts(measured.requests, measured.num_draft_tokens)) | {"value": totals.common_length}


def common_counts(requests: Sequence[Request], num_draft_tokens: int) -> np.ndarray[Any, Any]:
    """Return [requests, 2, 1]: rounds that offered a draft, and drafts accepted in them. `lengths` of it is the common
    length."""
    import numpy as np

    each = [round_totals([request], num_draft_tokens) for request in requests]
    return np.array([[[totals.rounds], [totals.accepted]] for totals in each], dtype=np.int64)


@metric("common_rate_by_position", "share", per="requests")
def common_rate_by_position(measured: Measured) -> list[float | None] | None:
    """Share of the rounds of `common_length` that accepted the draft at each position, which add up to it less 1."""
    totals = _common(measured)
    if totals is None or totals.by_position is None:
        return None
    return [ratio(count, totals.rounds) for count in totals.by_position]


def _common(measured: Measured) -> RoundTotals | None:
    """Return what every engine counts alike, or else the totals that it tells."""
    if not measured.num_draft_tokens or not measured.tells_offers:
        return None
    own = round_totals(measured.requests, measured.num_draft_tokens)
    return own if own.rounds or measured.totals is None else measured.totals


@metric("told")
def told(measured: Measured) -> dict[str, float | None]:
    """Numbers that another engine tells of itself, under its own names."""
    return dict(measured.told)


@metric("acceptance_length_all", "tokens a round", per="requests")
def acceptance_length_all(measured: Measured) -> float | None:
    """Really emitted tokens / request rounds, pooled: rounds cut short count as they were cut. What speed rests on."""
    if not measured.num_draft_tokens:
        return None
    return ratio(num_emitted_tokens(measured), num_request_rounds(measured))


@metric("acceptance_rate_by_position", "share", per="requests")
def acceptance_rate_by_position(measured: Measured) -> dict[str, list[Any]]:
    """Share of draft tokens accepted at each draft position. Drafts behind an end of sequence do not count.
    `conditional` is over the drafts that were offered and reached at the position, every earlier draft of the round
    being accepted; their number is `reached`. `unconditional` is the share of all rounds, whatever they offered, so
    that 1 + its sum is `acceptance_length`.

    It is estimated where texts end inside rounds (`draft_counts.py`). Where every round offers K drafts it is the
    product of the conditional ones up to the position.
    """
    counts = draft_counts(measured.requests, measured.num_draft_tokens)
    return {"unconditional": counts.unconditional, "conditional": counts.conditional, "reached": counts.offered}


@metric("accepted_histogram", "request rounds", per="requests")
def accepted_histogram(measured: Measured) -> dict[int, int] | None:
    """Request rounds by number of accepted draft tokens (0 to K), before any cut."""
    if num_request_rounds(measured) is None:
        return None
    counts = Counter(accepted for request in measured.requests for accepted, _, _ in rounds_of(request))
    return {number: counts[number] for number in range(measured.num_draft_tokens + 1)}


@metric("emitted_histogram", "request rounds", per="requests")
def emitted_histogram(measured: Measured) -> dict[int, int] | None:
    """Request rounds by number of emitted tokens (0 to K + 1), after any cut."""
    if not measured.tells("emitted_per_round"):
        return None
    counts = Counter(number for request in measured.requests for number in request.emitted_per_round or ())
    return {number: counts[number] for number in range(measured.num_draft_tokens + 2)}


@metric("acceptance_length_by", "tokens a round", per="requests")
def acceptance_length_by(measured: Measured) -> dict[str, float | None]:
    """Acceptance length of the rounds that begin at a length of the text, prompt included (`context.256`: 256 to 511
    tokens), in a turn of a conversation (`turn.1`), and inside thinking or outside it (`phase.thinking`,
    `phase.answer`)."""
    if not measured.num_draft_tokens:
        return {}
    found = defaultdict[str, DraftCounts](lambda: DraftCounts.empty(measured.num_draft_tokens))
    for request in measured.requests:
        spans = request.thinking_spans
        for start, numbers in _placed_rounds(request):
            found[f"turn.{request.turn}"].add_round(*numbers)
            if start is not None:
                found[f"context.{1 << ((len(request.prompt_ids) + start).bit_length() - 1)}"].add_round(*numbers)
            if start is not None and spans is not None:
                is_thinking = any(low <= start < high for low, high in spans)
                found["phase.thinking" if is_thinking else "phase.answer"].add_round(*numbers)
    return {name: found[name].acceptance_length for name in sorted(found, key=lambda name: (len(name), name))}


def _placed_rounds(request: Request) -> Iterator[tuple[int | None, tuple[int, int, int | None]]]:
    """Yield the rounds of a request, each with its first output token's index; None where that is not told."""
    emitted = request.emitted_per_round
    start = 1
    for index, numbers in enumerate(rounds_of(request)):
        yield (None if emitted is None else start), numbers
        start += 0 if emitted is None else emitted[index]


@metric("rows", inside=True)
def rows(measured: Measured) -> dict[str, int]:
    """Drafts and rows of one pass over the workload: drafts made, drafts offered to verification, rows verified, rows
    of the drafter's catch-up by part of its layers, and rows of the prompt pass."""
    total = RowCounts()
    for counts in (*(each.rows for each in measured.first.rounds), *(each.rows for each in measured.first.prefills)):
        total.add(counts)
    return asdict(total)


@metric("experts_read", "experts a round", inside=True)
def experts_read(measured: Measured) -> dict[str, float | None] | None:
    """Number of different experts whose weights a round read, by stage: summed over layers and passes, averaged over
    rounds. It shows what verifying more rows costs a target with experts, and what pruning saves. Choices of padded
    rows are left out; null where no layer has experts.

    The prompt pass is not counted. A stage of several passes, such as recur, counts an expert again in each pass.
    """
    return _a_round(measured, measured.first.experts_read)


@metric("expert_bytes_read", "bytes a round", inside=True)
def expert_bytes_read(measured: Measured) -> dict[str, float | None] | None:
    """Bytes of the weights of the experts that a round read, by stage, counted as `experts_read` is."""
    return _a_round(measured, measured.first.expert_bytes_read)


def _a_round(measured: Measured, counts: ExpertCounts | None) -> dict[str, float | None] | None:
    num_rounds = len(measured.first.rounds)
    return None if counts is None else {stage: ratio(count, num_rounds) for stage, count in asdict(counts).items()}


@metric("relaxed", per="requests")
def relaxed_hits(measured: Measured) -> dict[str, float | None] | None:
    """Accepted drafts that were not the target's argmax, before any cut (`hits`), and their number for 1000 tokens
    emitted in rounds; null for a rule that never relaxes."""
    hits = [rnd.relaxed[place] for rnd, place in measured.rounds() if rnd.relaxed is not None]
    if not hits:
        return None
    return {"hits": sum(hits), "per_1000_tokens": ratio(1000 * sum(hits), num_emitted_tokens(measured))}


@metric("plan_tokens", "tokens a request round")
def plan_tokens(measured: Measured) -> dict[str, float | None]:
    """Tokens of a request's round that `drafter.plan` expected before the launch, and those that the rule emitted,
    before any cut, over the rounds of the first turn; null without a plan that expects something."""
    rounds = [each for each in measured.first.rounds if each.num_expected is not None and each.accepted]
    count = sum(len(each.accepted) for each in rounds)
    return {
        "expected": ratio(sum(each.num_expected or 0.0 for each in rounds), count),
        "emitted": ratio(sum(sum(each.accepted) + len(each.accepted) for each in rounds), count),
    }


@metric("parts", per="requests")
def parts(measured: Measured) -> dict[str, dict[str, int]] | None:
    """Rounds, drafts offered and drafts accepted (before any cut) of each part of drafter=hybrid; null for others."""
    counts: dict[str, dict[str, int]] = {}
    for request in measured.requests:
        for name, (accepted, _, offered) in zip(request.drafted_by or (), rounds_of(request), strict=False):
            of_part = counts.setdefault(name, {"rounds": 0, "offered": 0, "accepted": 0})
            of_part["rounds"] += 1
            of_part["offered"] += offered or 0
            of_part["accepted"] += accepted
    return counts or None


@metric("distance", per="requests")
def distance(measured: Measured) -> dict[str, float | None] | None:
    """Distance between the law that a token was drawn from and the target's, averaged over the tokens that rules chose
    in rounds, before any cut: total variation, with its 95 % interval over requests, and KL of the emitted law from
    the target's in nats; null for a rule that does not say, KL also where it is infinite.

    The distance is computed exactly from the prefix and the drafter's law, not estimated from samples. A rule that
    looks ahead is judged given the drafts that it looked at.
    """
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
    for record, place in measured.rounds():
        if record.distance is not None:
            variation, divergence = record.distance[place]
            more = record.accepted[place] + 1, variation, math.inf if divergence is None else divergence
            of_request = sums[record.request_ids[place]]
            of_request[:] = [old + new for old, new in zip(of_request, more, strict=True)]
    if not sums:
        return None
    tokens, variation, divergence = (sum(column) for column in zip(*sums.values(), strict=True))
    mean = variation / tokens
    found = {"total_variation": mean, "low": None, "high": None, "kl": divergence / tokens}
    if len(sums) > 1:  # the interval is that of a ratio of two sums over requests, linearised
        apart = [of_request[1] - mean * of_request[0] for of_request in sums.values()]
        half = Z * stdev(apart) * math.sqrt(len(sums)) / tokens
        found |= {"low": max(0.0, mean - half), "high": min(1.0, mean + half)}
    return found
