"""Aligned plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence

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
