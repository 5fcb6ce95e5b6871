"""Aligned plain-text tables, no wider than the terminal if the columns that name a line leave room."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from spec_lab.core.errors import one_line, visible

GAP = "  "
USUAL_WIDTH = 80
WIDEST_TEXT = 120
CUT = "..."


def text_width() -> int:
    """Return the width for lines of text: that for tables, but at most 120."""
    return min(table_width(), WIDEST_TEXT)


def table_width() -> int:
    """Return the width for tables: COLUMNS, else the terminal's, else 80."""
    return shutil.get_terminal_size((USUAL_WIDTH, 24)).columns


def paragraph(text: str, width: int | None = None, indent: str = "") -> str:
    """Break a text into lines of `width`, or of `text_width`. All lines but the first begin with `indent`."""
    return textwrap.fill(one_line(text), width or text_width(), subsequent_indent=indent, break_on_hyphens=False)


def format_table(
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    left: Sequence[str] = (),
    num_keys: int = 1,
    width: int | None = None,
) -> str:
    """Format a table. Columns are as wide as their widest cell, and right-aligned except those in `left`.

    If the table is too wide, its further columns follow below, with the keys of each line repeated. If a cell does not
    fit beside the keys, it is cut at its beginning, since the names of folders differ at the end. Keys are never cut.

    Args:
        num_keys: number of leading columns that name a line, the keys.
        width: the available width in characters; None for the terminal's.
    """
    width = table_width() if width is None else width
    header = [visible(name) for name in header]
    cells = [header, *([visible(cell) for cell in row] for row in body)]
    keys = [max(len(row[column]) for row in cells) + len(GAP) for column in range(num_keys)]
    room = max(width - sum(keys), len(CUT) + 1)
    cells = [[*row[:num_keys], *(_cut(cell, room) for cell in row[num_keys:])] for row in cells]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    parts = _split(widths, num_keys, width)
    return "\n\n".join(_format(cells, widths, header, columns, left) for columns in parts)


def _cut(cell: str, room: int) -> str:
    return cell if len(cell) <= room else CUT + cell[len(cell) - room + len(CUT) :]


def _split(widths: Sequence[int], num_keys: int, width: int) -> list[list[int]]:
    """Return the columns of each part of the table; each part begins with the keys."""
    keys = list(range(num_keys))
    keys_width = sum(widths[:num_keys]) + len(GAP) * (num_keys - 1)
    parts, used = [keys], keys_width
    for column, own in enumerate(widths[num_keys:], start=num_keys):
        if used + len(GAP) + own > width and parts[-1] != keys:
            parts.append(keys)
            used = keys_width
        parts[-1] = [*parts[-1], column]
        used += len(GAP) + own
    return parts


def _format(
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    header: Sequence[str],
    columns: Sequence[int],
    left: Sequence[str],
) -> str:
    rule = ["-" * width for width in widths]
    lines = [
        GAP.join(
            row[column].ljust(widths[column]) if header[column] in left else row[column].rjust(widths[column])
            for column in columns
        ).rstrip()
        for row in [cells[0], rule, *cells[1:]]
    ]
    return "\n".join(lines)
