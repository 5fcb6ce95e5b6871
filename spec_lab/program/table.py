"""Aligned plain-text tables, no wider than the terminal."""

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
    """Return the columns that lines of text may take: the terminal's, at most 120; 80 where there is none to ask."""
    return min(table_width(), WIDEST_TEXT)


def table_width() -> int:
    """Return the columns that a table may take: COLUMNS, else those of the terminal, else 80."""
    return shutil.get_terminal_size((USUAL_WIDTH, 24)).columns


def paragraph(text: str, width: int | None = None, indent: str = "") -> str:
    """Break a text into lines of `width`, or of `text_width`; those behind the first begin with `indent`."""
    return textwrap.fill(one_line(text), width or text_width(), subsequent_indent=indent, break_on_hyphens=False)


def format_table(
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    left: Sequence[str] = (),
    num_keys: int = 1,
    width: int | None = None,
) -> str:
    """Set columns as wide as their widest cell, right-aligned, except those named in `left`.

    A table that is too wide goes on below with its further columns, and the keys of each line again in front of them.
    A cell that is too wide for itself alone keeps its end, which tells folders apart.

    Args:
        num_keys: leading columns that name a line.
        width: columns to fit into; None for those of the terminal.
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
    """Choose which columns stand side by side; the keys in front of each part."""
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
