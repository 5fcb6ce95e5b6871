"""Means, medians, percentiles and ratios, each None if it is undefined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the value below which `percent` % of the values lie, interpolated linearly between the two nearest."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median_over_repeats(values: Iterable[float | None]) -> float | None:
    """Return the median over the repeats that have a value."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def ratio(numerator: float, denominator: float) -> float | None:
    """Return the ratio of two numbers; None if the second is 0."""
    return numerator / denominator if denominator else None


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of some values; None if there are none."""
    return sum(values) / len(values) if values else None
