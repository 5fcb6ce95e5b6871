"""Writes numbers for tables and sentences."""

from __future__ import annotations

ABSENT = "-"


def number(value: float | None, digits: int = 2) -> str:
    """Write a number with thousands separators, or `-` for None."""
    return ABSENT if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share of 1 as a percentage."""
    return ABSENT if value is None else f"{100 * value:.{digits}f}%"


def with_range(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """Write a value with the ends of its interval, `1.42 (1.38 to 1.47)`; without ends the value alone."""
    if value is None or low is None or high is None:
        return number(value, digits)
    return f"{number(value, digits)} ({number(low, digits)} to {number(high, digits)})"
