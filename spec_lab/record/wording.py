"""Writes numbers for tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

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


def format_table(header: Sequence[str], body: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Write a table of text; columns are right-aligned except those in `left`. It needs no pandas."""
    lines = [header, *body]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    sides = ["<" if name in left else ">" for name in header]
    return "\n".join(
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    )
