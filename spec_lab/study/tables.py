"""One way to make a table from a frame, and its forms: text, Markdown, CSV, LaTeX, HTML.

A column is a number of the frame by its dotted name. Its unit decides how it is written, and its interval stands behind
it where the frame has one (`speedup.mean` with `speedup.mean_low` and `speedup.mean_high`, or `accuracy.low`).
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from spec_lab.record.answers import answers_cut
from spec_lab.record.metric import METRICS
from spec_lab.record.summary import definitions
from spec_lab.record.wording import ABSENT
from spec_lab.study.frame import provenance

WIDEST_TEXT = 120
DIGITS = {"tokens/s": 1, "requests/s": 2, "ms": 2, "times": 2, "tokens a round": 2, "tokens": 0, "bytes": 0, "s": 1}
COUNTS = (
    "rows.",
    "accepted_histogram",
    "emitted_histogram",
    "divergence.",
    "K",
    "run",
    "rounds",
    "num_requests",
    "repeats",
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table in all of its forms.

    Attributes:
        raw: the numbers, with the ends of intervals in columns of their own.
        shown: the cells as text.
        origin: provenance of each row (`frame.PROVENANCE`).
    """

    title: str
    raw: pd.DataFrame
    shown: pd.DataFrame
    note: str = ""
    origin: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def caption(self) -> str:
        """Return the note, and the provenance that all rows share."""
        alike = {name: values.iloc[0] for name, values in self.origin.items() if values.map(repr).nunique() == 1}
        known = ", ".join(f"{name} {value}" for name, value in alike.items() if not _is_null(value))
        return " ".join(part for part in (self.note, f"All rows: {known}." if known else "") if part)

    def text(self) -> str:
        """Return it for a terminal, in parts if it is too wide."""
        width = shutil.get_terminal_size((100, 24)).columns
        body = self.shown.to_string(index=False, line_width=width) if len(self.shown) else "(no rows)"
        return f"{self.title}\n\n{body}\n\n{paragraph(self.note, width)}".rstrip()

    def markdown(self) -> str:
        """Return it for a document."""
        table = self._with_differing_origin()
        lines = [[_escaped(name) for name in table], ["---:" if self._is_number(name) else "---" for name in table]]
        lines += [[_escaped(cell) for cell in row] for row in table.itertuples(index=False)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{body}\n\n{self.caption}".rstrip()

    def csv(self) -> str:
        """Return the numbers, each row with its whole provenance."""
        return _beside(self.raw, self.origin).to_csv(index=False)

    def latex(self) -> str:
        """Return it for a paper."""
        table = self._with_differing_origin()
        form = "".join("r" if self._is_number(name) else "l" for name in table)
        style = table.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1)
        caption = _latex(f"{self.title}{'' if self.title.endswith('?') else '.'} {self.caption}")
        return style.to_latex(column_format=form, caption=caption, hrules=True, position="htbp")

    def html(self) -> str:
        """Return it for a page."""
        return self._with_differing_origin().to_html(index=False, border=0, escape=True, na_rep=ABSENT)

    def _with_differing_origin(self) -> pd.DataFrame:
        """Return the cells with those columns of the provenance in which rows differ and that no column shows."""
        differing = self.origin.loc[:, [values.map(repr).nunique() > 1 for _, values in self.origin.items()]]
        told = {tuple(values.astype(str)) for _, values in self.shown.items()}
        new = [name for name, values in differing.items() if tuple(values.astype(str)) not in told]
        return _beside(self.shown, differing[new].map(lambda value: ABSENT if _is_null(value) else str(value)))

    def _is_number(self, name: object) -> bool:
        return name in self.raw and pd.api.types.is_numeric_dtype(self.raw[name])


def table_of(
    rows: pd.DataFrame,
    columns: Mapping[str, str],
    title: str = "",
    note: str = "",
    across: str | None = None,
    shown: str | None = None,
) -> Table:
    """Make a table with a line for each row of a frame.

    Args:
        columns: the frame's columns by their headers. Those that the frame lacks or that are empty are left out.
        across: a column of the frame whose values become columns, each with the numbers of `shown`.
    """
    rows = rows.reset_index(drop=True)
    known = {head: name for head, name in columns.items() if name in rows and rows[name].notna().any()}
    raw, cells = pd.DataFrame(index=rows.index), pd.DataFrame(index=rows.index)
    for head, name in known.items():
        raw[head] = rows[name]
        cells[head] = [cell(row, name) for row in rows.to_dict("records")]
        for end in ("low", "high"):
            if (bound := _bound(rows, name, end)) is not None:
                raw[f"{head} {end}"] = rows[bound]
    origin = provenance(rows)
    if across is not None and across in rows and shown is not None:
        head = next(head for head, name in known.items() if name == shown)
        keys = [key for key in known if known[key] not in (shown, across)]
        raw, cells = (_unstacked(each[[*keys, head]], keys, head, rows[across]) for each in (raw, cells))
        origin = pd.DataFrame()
    return Table(title, raw, cells, note, origin=origin)


def cell(row: Mapping[str, Any], name: str) -> str:
    """Write a number of a row as its unit asks, with its interval if the row has one."""
    value = row.get(name)
    if _is_null(value):
        return ABSENT
    if isinstance(value, str):
        return value
    if name == "accuracy" and answers_cut(row):
        return "cut"
    ends = [row.get(bound) for end in ("low", "high") if (bound := _bound(row, name, end)) is not None]
    mark = "*" if row.get("imposed") is True and name.startswith("acceptance_") else ""
    if len(ends) < 2 or any(map(_is_null, ends)):
        return f"{written(name, value)}{mark}"
    return f"{written(name, value)}{mark} ({written(name, ends[0])} to {written(name, ends[1])})"


def written(name: str, value: Any) -> str:
    """Write a number by the name of its metric."""
    if isinstance(value, (bool, str)):
        return str(value)
    unit = unit_of(name)
    if unit == "share":
        return f"{100 * value:.1f}%"
    if unit == "bytes" and value >= 2**20:
        return f"{value / 2**30:.2f} GiB"
    if float(value).is_integer() and (name.startswith(COUNTS) or unit not in DIGITS):
        return f"{int(value):,}"
    return f"{value:,.{DIGITS.get(unit, 2)}f}"


def unit_of(name: str) -> str:
    """Return the unit of a number by its dotted name."""
    if name.endswith((".n", ".cut", ".lost", ".gained")):  # of accuracy and its change: prompts
        return ""
    while name:
        if name in METRICS:
            return METRICS[name].unit
        name = name.rpartition(".")[0]
    return ""


def format_definitions() -> str:
    """Explain every number, in a paragraph each."""
    every = definitions()
    width = max(map(len, every)) + 2
    lines = [
        textwrap.fill(text, WIDEST_TEXT, initial_indent=name.ljust(width), subsequent_indent=" " * width)
        for name, text in every.items()
    ]
    return "\n".join(["Definitions", *lines])


def paragraph(text: str, width: int = WIDEST_TEXT) -> str:
    """Break a text into lines."""
    return textwrap.fill(text, min(width, WIDEST_TEXT), break_on_hyphens=False)


def _bound(row: Any, name: str, end: str) -> str | None:
    return next((bound for bound in (f"{name}.{end}", f"{name}_{end}") if bound in row), None)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and pd.isna(value))


def _unstacked(table: pd.DataFrame, keys: Sequence[str], head: str, across: pd.Series) -> pd.DataFrame:
    wide = table.assign(**{"": across}).pivot_table(
        index=list(keys), columns="", values=head, aggfunc="first", sort=False
    )
    return wide.reset_index().rename_axis(columns=None)


def _beside(table: pd.DataFrame, more: pd.DataFrame) -> pd.DataFrame:
    new = [name for name in more if name not in table]
    return pd.concat([table.reset_index(drop=True), more[new].reset_index(drop=True)], axis=1) if new else table


def _escaped(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _latex(text: str) -> str:
    for letter in "\\{}":
        text = text.replace(letter, " ")
    for letter in "#$%&_":
        text = text.replace(letter, f"\\{letter}")
    return text.replace("^", r"\textasciicircum{}").replace("~", r"\textasciitilde{}")


def joined(tables: Iterable[Table]) -> str:
    """Return several tables for a terminal."""
    return "\n\n".join(table.text() for table in tables)
