"""Counts tokens, drafts and rows: how many were accepted, and how many were computed.

Two words matter here. A *round* is one target verify, which serves a batch of requests at once. A *request round* is
the part one request has in it. Acceptance is counted over request rounds, and times are means over rounds. The first
paragraph of a function's docstring is the definition of its number (`spec_lab.record.definitions`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import NormalDist
from typing import TYPE_CHECKING, cast

from spec_lab.record.averages import ratio
from spec_lab.record.draft_counts import DraftCounts
from spec_lab.record.schema import Distance, ExpertsReadByStage, PartCounts, PositionRates, Relaxed, Rows

if TYPE_CHECKING:
    from spec_lab.core.results import ExpertCounts, GenerationResult, PrefillRecord, RequestRecord, RoundRecord


def num_request_rounds(requests: Iterable[RequestRecord]) -> int:
    """Request rounds: how many times a request took part in a target verify; rounds cut short count."""
    return sum(len(request.emitted_per_round) for request in requests)


def num_emitted_tokens(requests: Iterable[RequestRecord]) -> int:
    """Tokens emitted in rounds, after any cut by EOS or a limit; the token sampled by the prompt pass is not
    counted."""
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

    The reasons are in `spec_lab/record/draft_counts.py`. Schema versions 1 and 2 left out the rounds cut short. That is
    biased low, since long rounds are more often cut. SGLang divides all output tokens, the prompt pass's token
    included, by the number of verifies. A round that offers fewer than K drafts accepts none at later positions, and
    counts with the tokens that it gives.
    """
    return draft_counts(requests, num_draft_tokens).acceptance_length


def acceptance_length_all(requests: Sequence[RequestRecord]) -> float | None:
    """Really emitted tokens / request rounds, pooled: rounds cut short count as they were cut. What speed rests on."""
    return ratio(num_emitted_tokens(requests), num_request_rounds(requests))


def acceptance_rate_by_position(requests: Iterable[RequestRecord], num_draft_tokens: int) -> PositionRates:
    """Share of draft tokens accepted at each draft position. Drafts behind an end of sequence do not count.

    `conditional` is over the drafts that were offered and reached at the position, every earlier draft of the round
    being accepted; their number is `reached`. `unconditional` is the share of all rounds, whatever they offered, so
    that 1 + its sum is `acceptance_length`. It is estimated where texts end inside rounds (`draft_counts.py`). Where
    every round offers K drafts it is the product of the conditional ones up to the position.
    """
    counts = draft_counts(requests, num_draft_tokens)
    return PositionRates(
        unconditional=counts.unconditional, conditional=counts.conditional, reached=list(counts.offered)
    )


def draft_counts(requests: Iterable[RequestRecord], num_draft_tokens: int) -> DraftCounts:
    """Drafts reached and accepted at each position, pooled over requests."""
    rounds = (
        counts
        for request in requests
        for counts in zip(request.accepted_per_round, request.judged_per_round, request.offered_per_round, strict=True)
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


def rows(rounds: Iterable[RoundRecord], prefills: Iterable[PrefillRecord]) -> Rows:
    """Drafts and rows of one pass over the workload: drafts made, drafts offered to verification, rows verified, and
    the rows of the drafter's catch-up and of the prompt pass that went on past the KV write."""
    total: Counter[str] = Counter()
    for counts in chain((record.rows for record in rounds), (record.rows for record in prefills)):
        total.update(asdict(counts))
    return cast(Rows, {name: total[name] for name in Rows.__annotations__})


def experts_read(result: GenerationResult) -> ExpertsReadByStage | None:
    """Number of different experts whose weights a round read, by stage: summed over layers and passes, averaged over
    rounds. It shows what verifying more rows costs a target with experts, and what pruning saves. Choices of padded
    rows are left out; null where no layer has experts.

    The prompt pass is not counted. A stage of several passes, such as recur, counts an expert again in each pass.
    """
    return _a_round(result.experts_read, len(result.rounds))


def expert_bytes_read(result: GenerationResult) -> ExpertsReadByStage | None:
    """Bytes of the weights of the experts that a round read, by stage, counted as `experts_read` is."""
    return _a_round(result.expert_bytes_read, len(result.rounds))


def _a_round(counts: ExpertCounts | None, num_rounds: int) -> ExpertsReadByStage | None:
    """Return the counts averaged over rounds."""
    if counts is None or num_rounds == 0:
        return None
    return ExpertsReadByStage(
        verify=counts.verify / num_rounds, catchup=counts.catchup / num_rounds, recur=counts.recur / num_rounds
    )


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
    rate = ratio(1000 * sum(hits), num_emitted_tokens(requests))
    return Relaxed(hits=sum(hits), per_1000_tokens=rate)


def parts(requests: Iterable[RequestRecord]) -> dict[str, PartCounts] | None:
    """Rounds, drafts offered and drafts accepted (before any cut) of each part of drafter=hybrid; null for others."""
    counts: dict[str, PartCounts] = {}
    for request in requests:
        if request.drafted_by:
            rounds = zip(request.drafted_by, request.offered_per_round, request.accepted_per_round, strict=True)
            for name, offered, accepted in rounds:
                of_part = counts.setdefault(name, PartCounts(rounds=0, offered=0, accepted=0))
                of_part["rounds"] += 1
                of_part["offered"] += offered
                of_part["accepted"] += accepted
    return counts or None


def distance(requests: Collection[RequestRecord], rounds: Iterable[RoundRecord]) -> Distance | None:
    """Distance between the law that a token was drawn from and the target's, averaged over the tokens that rules chose
    in rounds, before any cut: total variation, with its 95 % interval over requests, and KL of the emitted law from
    the target's in nats; null for a rule that does not say, KL also where it is infinite.

    The distance is computed exactly from the prefix and the drafter's law, not estimated from samples. A rule that
    looks ahead is judged given the drafts that it looked at.
    """
    sums: dict[str, list[float]] = {request.request_id: [0.0, 0.0, 0.0] for request in requests}
    for record in rounds:
        if record.distance is None:
            continue
        for request_id, accepted, apart in zip(record.request_ids, record.accepted, record.distance, strict=True):
            if request_id in sums:
                of_request = sums[request_id]
                of_request[:] = of_request[0] + accepted + 1, of_request[1] + apart[0], of_request[2] + apart[1]
    measured = [of_request for of_request in sums.values() if of_request[0]]
    if not measured:
        return None
    tokens, variation, divergence = (sum(column) for column in zip(*measured, strict=True))
    mean = variation / tokens
    # The interval is that of a ratio of two sums over requests, linearised.
    spread = [of_request[1] - mean * of_request[0] for of_request in measured]
    half = None
    if len(measured) > 1:
        deviation = math.sqrt(sum(x * x for x in spread) / (len(measured) - 1) * len(measured)) / tokens
        half = NormalDist().inv_cdf(0.975) * deviation
    return Distance(
        total_variation=mean,
        low=None if half is None else max(0.0, mean - half),
        high=None if half is None else min(1.0, mean + half),
        kl=divergence / tokens if math.isfinite(divergence) else None,
    )
