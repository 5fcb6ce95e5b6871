"""The acceptance length against processes whose true one is known, and against rounds worked out by hand.

A round of the process accepts each draft with one chance, whatever came before, so its mean length is a geometric sum.
Texts that end after few tokens must give the length that endless ones have.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from spec_lab.core.results import RequestRecord
from spec_lab.record import acceptance
from spec_lab.record.draft_counts import DraftCounts, acceptance_length, draft_counts
from spec_lab.record.metric import Measured
from tests.fake_runs import make_request

NUM_DRAFT_TOKENS = 5
CHANCE = 0.7
TRUE_LENGTH = sum(CHANCE**position for position in range(NUM_DRAFT_TOKENS + 1))
NUM_ROUNDS = 60_000
TOLERANCE = 0.005
LIMITS = [8, 64]


def cut_by_a_limit(length: int) -> list[RequestRecord]:
    """Cut outputs at `length` tokens: what the last round emitted beyond is lost."""
    rng = random.Random(length)
    requests, num_rounds = [], 0
    while num_rounds < NUM_ROUNDS:
        accepted: list[int] = []
        while sum(accepted) + len(accepted) < length:
            accepted.append(num_accepted(rng, NUM_DRAFT_TOKENS))
        emitted = [m + 1 for m in accepted]
        emitted[-1] -= sum(emitted) - length
        requests.append(make_request("r", accepted, emitted, truncated=emitted[-1] < accepted[-1] + 1))
        num_rounds += len(accepted)
    return requests


def ended_by_end_of_sequence(length: int) -> list[RequestRecord]:
    """Texts of which token number `length` is an end of sequence; no draft behind one is ever accepted."""
    rng = random.Random(length)
    requests, num_rounds = [], 0
    while num_rounds < NUM_ROUNDS:
        accepted: list[int] = []
        left = length
        while left > 0:
            accepted.append(num_accepted(rng, min(left, NUM_DRAFT_TOKENS)))
            left -= accepted[-1] + 1
        judged = [m + 1 for m in accepted]
        judged[-1] -= sum(judged) - length
        requests.append(make_request("r", accepted, judged, judged=judged, truncated=judged[-1] < accepted[-1] + 1))
        num_rounds += len(accepted)
    return requests


def num_accepted(rng: random.Random, most: int) -> int:
    return next((position for position in range(most) if rng.random() >= CHANCE), most)


def as_emitted(requests: Sequence[RequestRecord]) -> float:
    return acceptance.acceptance_length_all(Measured(requests, (), 3)) or 0.0


def as_judged(requests: Sequence[RequestRecord]) -> float:
    """The acceptance length as vLLM defines it, 1 + accepted drafts / rounds: (rounds + accepted drafts) / rounds,
    whatever was cut off.
    """
    histogram = acceptance.accepted_histogram(Measured(requests, (), NUM_DRAFT_TOKENS))
    return sum((m + 1) * count for m, count in histogram.items()) / sum(histogram.values())


def bias(length: float | None) -> float:
    return (length or 0.0) / TRUE_LENGTH - 1


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_does_not_bias_it(limit: int) -> None:
    requests = cut_by_a_limit(limit)
    assert abs(bias(acceptance_length(requests, NUM_DRAFT_TOKENS))) < TOLERANCE
    assert acceptance_length(requests, NUM_DRAFT_TOKENS) == as_judged(requests)
    assert bias(as_emitted(requests)) < -2 * TOLERANCE
    assert_rates_are_not_biased(requests)


@pytest.mark.parametrize("length", LIMITS)
def test_an_end_of_sequence_does_not_bias_it(length: int) -> None:
    requests = ended_by_end_of_sequence(length)
    assert abs(bias(acceptance_length(requests, NUM_DRAFT_TOKENS))) < TOLERANCE
    assert bias(as_emitted(requests)) < -2 * TOLERANCE
    assert bias(as_judged(requests)) < -2 * TOLERANCE if length < 64 else -TOLERANCE
    assert_rates_are_not_biased(requests)


def assert_rates_are_not_biased(requests: list[RequestRecord]) -> None:
    rates = draft_counts(requests, NUM_DRAFT_TOKENS)
    assert rates.conditional == pytest.approx([CHANCE] * NUM_DRAFT_TOKENS, rel=0.02)
    powers = [CHANCE**position for position in range(1, NUM_DRAFT_TOKENS + 1)]
    assert rates.unconditional == pytest.approx(powers, rel=0.04)


def test_a_round_cut_by_a_limit_counts_as_it_was_judged() -> None:
    """4 + 1 + 3 + 2 + 4 tokens over 5 rounds, though of the last one only 2 were emitted."""
    requests = [make_request("a", [3, 0, 2]), make_request("b", [1, 3], [2, 2], truncated=True)]
    assert acceptance_length(requests, 3) == (4 + 1 + 3 + 2 + 4) / 5
    assert acceptance.acceptance_length_all(Measured(requests, (), 3)) == (4 + 1 + 3 + 2 + 2) / 5


def test_a_round_cut_by_end_of_sequence_counts_up_to_there() -> None:
    """Draft 2 of the last round was the end: drafts 1 and 2 were accepted, and what stood behind is not known.

    Position 1: 3 of 4. Position 2: 2 of 3. Position 3: 1 of the 1 that reached it.
    """
    requests = [make_request("a", [3, 0, 1]), make_request("b", [2], [2], judged=[2], truncated=True)]
    rates = draft_counts(requests, 3)
    assert rates.offered == [4, 3, 1]
    assert rates.conditional == [3 / 4, 2 / 3, 1.0]
    assert rates.unconditional == [3 / 4, 1 / 2, 1 / 2]
    assert acceptance_length(requests, 3) == 1 + 3 / 4 + 1 / 2 + 1 / 2


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([], None),
        ([(3, 1)], None),  # all that is known is that draft 1 was right
        ([(3, 1), (0, 1)], None),
        ([(3, 1), (1, 2)], 1 + 1.0 + 0.0),
        ([(0, 1)], 1.0),
        ([(3, 4)], 4.0),
        ([(3, 3), (3, 4)], 4.0),
    ],
)
def test_what_was_not_judged_is_not_known(rounds: list[tuple[int, int]], expected: float | None) -> None:
    """Rounds as (accepted drafts, judged tokens). Behind a position where nothing is accepted nothing can be."""
    counts = DraftCounts.empty(3)
    for numbers in rounds:
        counts.add_round(*numbers)
    assert counts.acceptance_length == expected


def test_rounds_that_offer_fewer_drafts_count_as_what_they_give() -> None:
    """Four rounds of a K of 3: of all they accept 2, 0, 1 and 0 drafts, and offer 3, 1, 1 and 0.

    The first draft was offered three times and accepted twice, though four rounds could have had one.
    """
    requests = [make_request("r", [2, 0, 1, 0], offered=[3, 1, 1, 0])]
    rates = draft_counts(requests, 3)
    assert acceptance_length(requests, 3) == 7 / 4
    assert rates.unconditional == [2 / 4, 1 / 4, 0.0]
    assert rates.conditional == [2 / 3, 1.0, 0.0]
    assert rates.offered == [3, 1, 1]


def test_a_position_that_is_never_offered_has_no_rate() -> None:
    requests = [make_request("r", [1, 0], offered=[1, 1])]
    rates = draft_counts(requests, 3)
    assert acceptance_length(requests, 3) == 1.5
    assert rates.unconditional == [0.5, 0.0, 0.0]
    assert rates.conditional == [0.5, None, None]
