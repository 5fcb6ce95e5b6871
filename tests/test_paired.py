"""The rule by which speeds are compared, held to what it promises: in simulated turns, and on made-up records."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from spec_lab.record.paired import PairedRatio, of_turns, order_of_turn, over_reference, t_quantile
from tests.fake_runs import MAIN, PLAIN, UNPRUNED, make_summary, measure

NUM_DRAWS = 1000
RUN, PLAIN_NAME = "this run", "plain"
Noise = Callable[[random.Random], float]


def normal(rng: random.Random) -> float:
    return rng.gauss(0, 0.02)


def heavy(rng: random.Random) -> float:
    """Draw from Student's t with two degrees of freedom, which has no variance."""
    return 0.02 * rng.gauss(0, 1) / math.sqrt((rng.gauss(0, 1) ** 2 + rng.gauss(0, 1) ** 2) / 2)


def slowed_at_times(rng: random.Random) -> float:
    """Every seventh pass or so loses a third of its rate, or much more, to another job."""
    return normal(rng) - (rng.expovariate(3) if rng.random() < 0.15 else 0.0)


def simulated(
    rng: random.Random, num_turns: int, names: Sequence[str], noise: Noise, drift: float = 0.0, gain: float = 1.0
) -> PairedRatio:
    """Return what passes in turns would come to whose rate drifts by `drift` from pass to pass."""
    level = 0.0
    rates: dict[str, list[float | None]] = {name: [] for name in names}
    for turn in range(num_turns):
        for name in order_of_turn(names, turn):
            level += drift
            rates[name].append((gain if name == RUN else 1.0) * math.exp(level + noise(rng)))
    ratio = of_turns(rates[RUN], rates[PLAIN_NAME])
    assert ratio is not None
    return ratio


@pytest.mark.parametrize(
    ("noise", "drift", "num_turns"),
    [
        (normal, 0.0, 3),
        (normal, -0.03, 3),
        (normal, -0.03, 9),
        (heavy, 0.0, 5),
        (slowed_at_times, -0.03, 3),
        (slowed_at_times, -0.03, 9),
    ],
)
def test_equal_speeds_are_seldom_called_different(noise: Noise, drift: float, num_turns: int) -> None:
    rng = random.Random(num_turns)
    found = [simulated(rng, num_turns, (RUN, PLAIN_NAME), noise, drift) for _ in range(NUM_DRAWS)]
    assert sum(not ratio.is_noise for ratio in found) <= 0.065 * NUM_DRAWS


def test_a_drift_hurts_no_side_with_a_third_in_turns_either() -> None:
    rng = random.Random(0)
    names = (RUN, PLAIN_NAME, "unpruned")
    found = [simulated(rng, 5, names, normal, -0.03) for _ in range(NUM_DRAWS)]
    assert sum(not ratio.is_noise for ratio in found) <= 0.065 * NUM_DRAWS


def test_a_gain_of_a_tenth_is_found_in_two_percent_of_scatter() -> None:
    rng = random.Random(5)
    found = [simulated(rng, 5, (RUN, PLAIN_NAME), normal, gain=1.1) for _ in range(NUM_DRAWS)]
    assert sum(ratio.is_above for ratio in found) >= 0.95 * NUM_DRAWS


def test_the_interval_narrows_with_turns() -> None:
    def width(num_turns: int) -> float:
        rng = random.Random(0)
        intervals = [simulated(rng, num_turns, (RUN, PLAIN_NAME), normal).interval for _ in range(200)]
        return sum(ends[1] - ends[0] for ends in intervals if ends is not None)

    assert width(5) > 1.3 * width(9) > 1.6 * width(30)


@pytest.mark.parametrize("num_turns", [1, 2])
def test_under_three_turns_nothing_is_judged(num_turns: int) -> None:
    ratio = of_turns([2.0] * num_turns, [1.0] * num_turns)
    assert ratio is not None and ratio.value == pytest.approx(2)
    assert (ratio.interval, ratio.is_judged, ratio.is_noise, ratio.is_above) == (None, False, False, False)


def test_the_mean_is_of_the_turns_ratios() -> None:
    """Each side halves its rate on the way; turn by turn the ratio is 2, 2 and 2."""
    ratio = of_turns([4.0, 3.0, 2.0], [2.0, 1.5, 1.0])
    assert ratio is not None and ratio.interval == pytest.approx((2, 2))


def test_turns_without_a_rate_on_both_sides_are_none() -> None:
    assert of_turns([None, 1.0, -1.0], [1.0, 0.0, 1.0]) is None
    ratio = of_turns([2.0, None], [1.0, 1.0])
    assert ratio is not None and ratio.num_turns == 1


def test_absurd_rates_have_a_number_all_the_same() -> None:
    ratio = of_turns([1e300, 1e-300, 1.0], [1e-300, 1e300, 1.0])
    assert ratio is not None and ratio.is_noise
    assert all(map(math.isfinite, ratio.ends))


@pytest.mark.parametrize(("freedom", "expected"), [(2, 4.3027), (3, 3.1824), (4, 2.7764), (8, 2.3060), (30, 2.0423)])
def test_the_quantile_is_students(freedom: int, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, rel=0.008 if freedom == 2 else 0.0015)


def test_runs_apart_are_compared_by_their_ratios_as_seldom_called_different() -> None:
    """The second run's machine is three times slower, drifts and scatters more."""
    rng, num_draws = random.Random(3), 2 * NUM_DRAWS

    def noisy(rng: random.Random) -> float:
        return 3 * normal(rng) - 1.1

    pairs = [
        (
            simulated(rng, 5, (RUN, PLAIN_NAME), normal, gain=1.3),
            simulated(rng, 5, (RUN, PLAIN_NAME), noisy, 0.02, 1.3),
        )
        for _ in range(num_draws)
    ]
    assert sum(not ours.over(theirs).is_noise for ours, theirs in pairs) <= 0.065 * num_draws
    better = [simulated(rng, 5, (RUN, PLAIN_NAME), normal, gain=1.5) for _ in range(num_draws)]
    worse = [simulated(rng, 5, (RUN, PLAIN_NAME), normal, gain=1.3) for _ in range(num_draws)]
    found = sum(ours.over(theirs).is_above for ours, theirs in zip(better, worse, strict=True))
    assert found >= 0.95 * num_draws


def test_a_run_apart_with_too_few_turns_is_not_judged() -> None:
    few, enough = of_turns([2.0, 2.1], [1.0, 1.0]), of_turns([2.0, 2.1, 2.2], [1.0, 1.0, 1.0])
    assert few is not None and enough is not None
    assert not few.over(enough).is_judged and not enough.over(few).is_judged
    same = enough.over(enough)
    assert same.value == pytest.approx(1) and same.is_noise


def test_the_order_of_passes_changes_from_turn_to_turn() -> None:
    orders = [order_of_turn(["a", "b", "c"], turn) for turn in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_a_record_has_what_each_turn_of_rounds_and_prompts_took() -> None:
    slow = measure(UNPRUNED, (2.0, 2.0, 2.0))
    summary = make_summary(main=measure(MAIN, (1.0, 1.0, 1.0)), references={"unpruned": slow})
    prompts = over_reference(summary, summary, "unpruned", "prefill_ms_per_request")
    assert prompts is not None and prompts.interval == pytest.approx((0.5, 0.5))
    assert over_reference(summary, summary, "plain") is None
    for turn in summary["repeats"]:
        del turn["prefill_ms_per_request"]
    assert over_reference(summary, summary, "unpruned", "prefill_ms_per_request") is None, "an older record"
    assert over_reference(summary, summary, "unpruned") is not None


def test_a_reference_is_not_set_against_itself() -> None:
    summary = make_summary(references={"plain": measure(PLAIN)})
    assert over_reference(summary["references"]["plain"], summary, "plain") is None
