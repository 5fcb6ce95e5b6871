"""How tables and verdicts compare speeds: by ratios within turns, and the scatter between turns.

A run and its references are timed in turns, so what slows the machine for much longer than a turn cancels out in the
ratio. The remaining scatter between turns gives a 95 % t interval of the mean log ratio. It narrows with more turns. A
difference is within noise if the ratio's interval includes 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal

from spec_lab.record.schema import Speed, Summary

LEAST_TURNS = 3
"""Fewer turns give no interval: two may agree by chance, and their t interval is seldom narrow enough to be useful."""
Reference = Literal["plain", "unpruned", "eager"]
Number = Literal["decode_tokens_per_second", "end_to_end_tokens_per_second", "round_ms", "prefill_ms_per_request"]
"""Numbers that a record has for each turn."""

_NORMAL_QUANTILE = NormalDist().inv_cdf(0.975)
_LARGEST_LOG = 700.0
"""A bound within which `exp` does not overflow."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of two rates, or of two times, over some turns.

    Attributes:
        log: mean of the logs of the turns' ratios.
        error: standard error of `log`; None if there are too few turns.
        freedom: degrees of freedom of that error.
        num_turns: number of turns that have both sides; for two runs, that of the run with fewer.
    """

    log: float
    error: float | None
    freedom: float
    num_turns: int

    @property
    def value(self) -> float:
        """Return the geometric mean over turns."""
        return _exp(self.log)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the ends of the 95 % t interval; None with fewer than `LEAST_TURNS` turns."""
        if self.error is None:
            return None
        reach = t_quantile(self.freedom) * self.error
        return _exp(self.log - reach), _exp(self.log + reach)

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """Return the ends of the interval for output, or (None, None) if there is none."""
        return self.interval or (None, None)

    @property
    def is_judged(self) -> bool:
        return self.interval is not None

    @property
    def is_noise(self) -> bool:
        """Return whether the interval includes 1."""
        return self.is_judged and not self.is_above and not self.is_below

    @property
    def is_above(self) -> bool:
        """Return whether the ratio is above 1 beyond noise."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def is_below(self) -> bool:
        """Return whether the ratio is below 1 beyond noise."""
        return self.interval is not None and self.interval[1] < 1

    def over(self, base: PairedRatio) -> PairedRatio:
        """Return this ratio over that of another run, with Welch's interval, since the turns of two runs are not
        paired."""
        log, num_turns = self.log - base.log, min(self.num_turns, base.num_turns)
        if self.error is None or base.error is None:
            return PairedRatio(log, None, 0.0, num_turns)
        variances = (self.error**2, base.error**2)
        total = sum(variances)
        parts = variances[0] ** 2 / self.freedom + variances[1] ** 2 / base.freedom
        freedom = total**2 / parts if parts else self.freedom + base.freedom
        return PairedRatio(log, math.sqrt(total), freedom, num_turns)


def of_turns(numbers: Sequence[float | None], others: Sequence[float | None]) -> PairedRatio | None:
    """Return the ratio of two sides' numbers, turn by turn; None if no turn has both above 0."""
    pairs = [(number, other) for number, other in zip(numbers, others, strict=True) if number and other]
    logs = [math.log(number) - math.log(other) for number, other in pairs if min(number, other) > 0]
    if not logs:
        return None
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) >= LEAST_TURNS else None
    return PairedRatio(fmean(logs), error, len(logs) - 1, len(logs))


def over_reference(
    part: Speed, summary: Summary, reference: Reference, number: Number = "decode_tokens_per_second"
) -> PairedRatio | None:
    """Return a number of the run, or of one of its references, over that of the named reference.

    It is None for that reference itself, without such a reference, or if no turn has both numbers above 0, as in some
    older records.
    """
    other = summary["references"].get(reference)
    if other is None or other is part:
        return None
    return of_turns(*([turn.get(number) for turn in speed["repeats"]] for speed in (part, other)))


def order_of_turn(names: Sequence[str], turn: int) -> list[str]:
    """Return the names rotated by `turn` places, so that a slowing machine does not always affect the same one."""
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]


def t_quantile(freedom: float) -> float:
    """Return Student's 97.5 % quantile by Cornish and Fisher, which is 0.75 % too low at 2 degrees and 0.12 % at 3."""
    z = _NORMAL_QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _exp(log: float) -> float:
    return math.exp(max(-_LARGEST_LOG, min(_LARGEST_LOG, log)))
