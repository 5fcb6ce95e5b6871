"""A paper's tables as they are printed, as LaTeX (booktabs), Markdown and CSV; some have a column for each task."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spec_lab.core.errors import one_line
from spec_lab.paper.provenance import COLUMNS
from spec_lab.paper.table import PaperTable, TableRow, cell, shared_and_differing
from spec_lab.record.wording import ABSENT

LATEX_SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as texts: its header, its lines, and the number of leading columns that hold text."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    num_texts: int


def grid_of(table: PaperTable) -> Grid:
    """Lay out a table with its rows as lines, or with a column for each value of the key `across`.

    Each part of the provenance in which rows differ has a column, unless a column of the table covers it.
    """
    own = {column.key for column in table.columns}
    covers = {"temperature": "sampler", "batch_size": "batch", "draft_tokens": "K"}
    hidden = {covers.get(key, key) for key in own}
    differing = [name for name in shared_and_differing(table)[1] if name not in hidden and name in COLUMNS]
    if table.across is None:
        keys = [column for column in table.columns if column.key in table.keys]
        others = [column for column in table.columns if column.key not in table.keys]
        header = [*(column.title for column in keys), *differing, *(column.title for column in others)]
        lines = [
            [
                *(cell(column, row.values) for column in keys),
                *(row.provenance[name] or ABSENT for name in differing),
                *(cell(column, row.values) for column in others),
            ]
            for row in table.rows
        ]
        return Grid(header, lines, len(keys) + len(differing))
    return _across(table, table.across, differing)


def _across(table: PaperTable, across: str, differing: Sequence[str]) -> Grid:
    shown = next(column for column in table.columns if column.key == table.shown)
    keys = [column for column in table.columns if column.key in table.keys and column.key != across]
    places = list(dict.fromkeys(str(row.values[across]) for row in table.rows))
    by_line: dict[tuple[str, ...], dict[str, TableRow]] = {}
    for row in table.rows:
        line = (*(cell(column, row.values) for column in keys), *(row.provenance[name] or ABSENT for name in differing))
        by_line.setdefault(line, {})[str(row.values[across])] = row
    lines = [
        [*line, *(ABSENT if place not in rows else cell(shown, rows[place].values) for place in places)]
        for line, rows in by_line.items()
    ]
    return Grid([*(column.title for column in keys), *differing, *places], lines, len(keys) + len(differing))


def caption_of(table: PaperTable) -> str:
    """Return the title, the note, and what all rows have in common."""
    shared, _ = shared_and_differing(table)
    known = [f"{name} {value}" for name, value in shared.items()]
    of_all = f" All rows: {'; '.join(known)}." if known else ""
    return one_line(f"{table.title}. {table.note}{of_all}")


def as_latex(table: PaperTable) -> str:
    """Write a `table` of LaTeX. It needs booktabs, and graphicx, whose \\resizebox scales it to the line."""
    grid = grid_of(table)
    alignment = "l" * grid.num_texts + "r" * (len(grid.header) - grid.num_texts)
    body = [" & ".join(map(_latex, line)) + r" \\" for line in grid.lines]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_latex(caption_of(table))}}}",
            rf"\label{{tab:{table.name.replace('_', '-')}}}",
            r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            " & ".join(map(_latex, grid.header)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
        ]
    )


def as_markdown(table: PaperTable) -> str:
    """Write a Markdown table with its caption in front."""
    grid = grid_of(table)
    rule = ["---"] * grid.num_texts + ["---:"] * (len(grid.header) - grid.num_texts)
    lines = [_markdown_line(line) for line in (grid.header, rule, *grid.lines)]
    return "\n".join([f"**{table.title}.** {caption_of(table).removeprefix(f'{table.title}. ')}", "", *lines])


def as_csv(table: PaperTable) -> str:
    """Write every number of every row unrounded, with all of the row's keys and provenance."""
    figures: list[str] = [
        key
        for column in table.columns
        for key in ([column.key] + ([f"{column.key}_low", f"{column.key}_high"] if column.interval else []))
    ]
    names = [name for name in COLUMNS if name not in figures]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*figures, *names])
    for row in table.rows:
        writer.writerow([*(row.values.get(key) for key in figures), *(row.provenance[name] for name in names)])
    return file.getvalue()


FORMATS: dict[str, tuple[str, Callable[[PaperTable], str]]] = {
    "latex": ("tex", as_latex),
    "markdown": ("md", as_markdown),
    "csv": ("csv", as_csv),
}


def _latex(text: str) -> str:
    return "".join(LATEX_SIGNS.get(letter, letter) for letter in one_line(text))


def _markdown_line(cells: Sequence[str]) -> str:
    escaped = (one_line(text).replace("|", r"\|") for text in cells)
    return f"| {' | '.join(escaped)} |"
