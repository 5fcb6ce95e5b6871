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
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from spec_lab.record.models import Part, Run

    Array = np.ndarray[Any, Any]

CONFIDENCE = 0.95
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


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of two rates, or of two times, over turns.

    Attributes:
        log: mean of the logs of the turns' ratios.
        error: standard error of `log`; None if there are too few turns.
        freedom: degrees of freedom of that error.
    """

    log: float
    error: float | None
    freedom: float
    num_turns: int

    @property
    def interval(self) -> Interval:
        """Return the geometric mean over turns with its t interval."""
        if self.error is None:
            return Interval(math.exp(self.log), None, None)
        from scipy.stats import t

        reach = float(t.ppf((1 + CONFIDENCE) / 2, self.freedom)) * self.error
        return Interval(math.exp(self.log), math.exp(self.log - reach), math.exp(self.log + reach))

    def over(self, base: PairedRatio) -> PairedRatio:
        """Return this ratio over that of another run, with Welch's interval, since turns of two runs are not paired."""
        log, num_turns = self.log - base.log, min(self.num_turns, base.num_turns)
        if self.error is None or base.error is None:
            return PairedRatio(log, None, 0.0, num_turns)
        variances = (self.error**2, base.error**2)
        parts = variances[0] ** 2 / self.freedom + variances[1] ** 2 / base.freedom
        freedom = sum(variances) ** 2 / parts if parts else self.freedom + base.freedom
        return PairedRatio(log, math.sqrt(sum(variances)), freedom, num_turns)


def of_turns(numbers: Sequence[Any], others: Sequence[Any]) -> PairedRatio | None:
    """Return the ratio of two sides' numbers, turn by turn; None if no turn has both above 0."""
    logs = [math.log(n / other) for n, other in zip(numbers, others, strict=True) if n and other and min(n, other) > 0]
    if not logs:
        return None
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) >= LEAST_TURNS else None
    return PairedRatio(fmean(logs), error, len(logs) - 1, len(logs))


def over_reference(
    run: Run, reference: str, number: str = "decode_tokens_per_second", part: Part | None = None
) -> PairedRatio | None:
    """Return a number of the run, or of one of its parts, over that of a reference; None for the reference itself."""
    other, part = run.references.get(reference), part or run
    if other is None or other is part:
        return None
    return of_turns(*([turn.get(number) for turn in each.repeats] for each in (part, other)))


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (Wilson 1927), which is accurate near 0 and 1 too."""
    from scipy.stats import binomtest

    found = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def paired_difference_interval(lost: int, gained: int, num_pairs: int) -> tuple[float, float]:
    """Return the interval of a difference of paired proportions: Wald's with half a pair added to each cell (Agresti,
    Min 2005). Unlike Wald's own it has a width even if no pair differs."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    lost_adjusted, gained_adjusted, total = lost + 0.5, gained + 0.5, num_pairs + 2
    change = (gained_adjusted - lost_adjusted) / total
    spread = z * (lost_adjusted + gained_adjusted - total * change * change) ** 0.5 / total
    return max(-1.0, change - spread), min(1.0, change + spread)


def lengths(counts: Array) -> Array:
    """Return the acceptance lengths of pooled counts [..., 2, K]: drafts reached and accepted at each position
    (`DraftCounts`); NaN where too few drafts were judged."""
    import numpy as np

    reached, accepted = counts[..., 0, :], counts[..., 1, :]
    rates = np.where(reached > 0, accepted / np.maximum(reached, 1), np.nan)
    shares, total = np.ones(counts.shape[:-2]), np.ones(counts.shape[:-2])
    for position in range(rates.shape[-1]):
        shares = np.where(shares == 0, 0.0, shares * rates[..., position])
        total = total + shares
    return total


def bootstrapped(statistic: Callable[..., Array], *sizes: int) -> Interval | None:
    """Return a statistic with its percentile interval; None if it is unknown.

    Args:
        statistic: takes an index array [..., size] for each of `sizes`, resampled apart from each other, and returns
            the statistic [...] of what they pick.
    """
    import numpy as np
    from scipy.stats import bootstrap

    everything = [np.arange(size) for size in sizes]
    value = float(statistic(*everything)) if min(sizes) else math.nan
    if math.isnan(value):
        return None
    if min(sizes) < LEAST_PROMPTS:
        return Interval(value, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resamples in which too few drafts were judged
        found = bootstrap(
            everything,
            lambda *picks, axis: statistic(*picks),
            n_resamples=NUM_RESAMPLES,
            batch=200,
            vectorized=True,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=SEED,
        ).bootstrap_distribution
    low, high = np.nanpercentile(found, (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)))
    return Interval(value, float(low), float(high))
