"""Aligned plain-text tables, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Sequence

ABSENT = "-"
GAP = "  "


def format_table(header: Sequence[str], body: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Columns as wide as their widest cell, right-aligned, except those named in `left`."""
    cells = [list(header), *[list(row) for row in body]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [
        GAP.join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ).rstrip()
        for row in [cells[0], rule, *cells[1:]]
    ]
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    """A number with thousands separated, `-` where there is none."""
    return ABSENT if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of 1 as a percentage."""
    return ABSENT if value is None else f"{100 * value:.{digits}f}%"


def with_range(value: float | None, low: float | None, high: float | None, digits: int = 2) -> str:
    """A value with the lowest and highest it took: `1.42 (1.38 to 1.47)`."""
    if value is None:
        return ABSENT
    return f"{number(value, digits)} ({number(low, digits)} to {number(high, digits)})"
