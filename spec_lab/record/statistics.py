"""Intervals, all 95 %: of shares, of paired differences, of ratios over turns, and of acceptance lengths over prompts.

A run and its references are timed in turns, so what slows the machine for much longer than a turn cancels out in the
ratio. The scatter between turns gives a t interval of the mean log ratio. A difference is within noise if the interval
of a ratio holds 1, or that of a difference 0. Requests, not rounds, are resampled, since the rounds of one text are
correlated; two runs over the same prompts are resampled together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from spec_lab.record.models import Run

    Array = np.ndarray[Any, Any]

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
LEAST_TURNS = 3
"""Fewer turns give no interval: two may agree by chance."""
LEAST_PROMPTS = 2
NUM_RESAMPLES, SEED = 2000, 0


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the ends of its interval, None if too little was measured for one."""

    value: float
    low: float | None
    high: float | None

    def holds(self, number: float) -> bool:
        """Return whether the interval holds `number`; true without ends."""
        return self.low is None or self.high is None or self.low <= number <= self.high


def ratios_of_turns(numbers: Sequence[Any], others: Sequence[Any]) -> list[float]:
    """Return the ratio of two sides' rates or times in each turn that has both above 0."""
    pairs = zip(numbers, others, strict=True)
    return [number / other for number, other in pairs if number and other and min(number, other) > 0]


def over_reference(run: Run, reference: str, number: str = "decode_tokens_per_second") -> list[float]:
    """Return the turns' ratios of a number of the run over that of a reference; none without the reference."""
    other = run.references.get(reference)
    if other is None:
        return []
    return ratios_of_turns(*([turn.get(number) for turn in part.repeats] for part in (run, other)))


def mean_ratio(ratios: Sequence[float], base: Sequence[float] | None = None) -> Interval | None:
    """Return the geometric mean of the ratios of turns with its t interval; None without any.

    Args:
        base: ratios of another run, by which they are divided; with Welch's interval, since turns of two runs are not
            paired.
    """
    import numpy as np
    from scipy.stats import ttest_1samp, ttest_ind

    sides = [np.log(side) for side in (ratios, base) if side is not None]
    if not all(map(len, sides)):
        return None
    value = math.exp(fmean(sides[0]) - sum(map(fmean, sides[1:])))
    if min(map(len, sides)) < LEAST_TURNS:
        return Interval(value, None, None)
    test = ttest_1samp(*sides, 0.0) if base is None else ttest_ind(*sides, equal_var=False)
    low, high = np.exp(test.confidence_interval(CONFIDENCE))
    return Interval(value, float(low), float(high))


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (Wilson 1927), which is accurate near 0 and 1 too."""
    from scipy.stats import binomtest

    found = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def paired_difference_interval(lost: int, gained: int, num_pairs: int) -> tuple[float, float]:
    """Return the interval of a difference of paired proportions: Wald's with half a pair added to each cell (Agresti,
    Min 2005). Unlike Wald's own it has a width even if no pair differs."""
    lost_adjusted, gained_adjusted, total = lost + 0.5, gained + 0.5, num_pairs + 2
    change = (gained_adjusted - lost_adjusted) / total
    spread = Z * (lost_adjusted + gained_adjusted - total * change * change) ** 0.5 / total
    return max(-1.0, change - spread), min(1.0, change + spread)


def lengths(counts: Array) -> Array:
    """Return the acceptance lengths of counts [..., requests, 2, K], pooled over requests: drafts reached and accepted
    at each position (`DraftCounts`); NaN where too few drafts were judged."""
    import numpy as np

    reached, accepted = np.moveaxis(counts.sum(axis=-3), -2, 0)
    rates = np.where(reached > 0, accepted / np.maximum(reached, 1), np.nan)
    shares = total = np.ones(rates.shape[:-1])
    for position in range(rates.shape[-1]):
        shares = np.where(shares == 0, 0.0, shares * rates[..., position])
        total = total + shares
    return total


def bootstrapped(statistic: Callable[..., Array], *sizes: int) -> Interval:
    """Return a statistic with its percentile interval; NaN if it is unknown.

    Args:
        statistic: takes an index array [..., size] for each of `sizes`, resampled apart from each other, and returns
            the statistic [...] of what they pick.
    """
    import numpy as np
    from scipy.stats import bootstrap

    everything = [np.arange(size) for size in sizes]
    value = float(statistic(*everything)) if min(sizes) else math.nan
    if math.isnan(value) or min(sizes) < LEAST_PROMPTS:
        return Interval(value, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resamples in which too few drafts were judged
        found = bootstrap(
            everything,
            lambda *picks, axis: statistic(*picks),
            n_resamples=NUM_RESAMPLES,
            batch=200,
            method="percentile",
            rng=SEED,
        ).bootstrap_distribution
    low, high = np.nanpercentile(found, (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)))
    return Interval(value, float(low), float(high))
