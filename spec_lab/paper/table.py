"""A table of a paper as data: it is stored in the JSON file, and LaTeX, Markdown and CSV are written from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spec_lab.paper.provenance import missing
from spec_lab.record.wording import ABSENT, number

Value = str | float | int | None


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column.

    Attributes:
        digits: number of decimals; None for a text.
        interval: whether the row also has `KEY_low` and `KEY_high`.
        signed: whether it is a difference, written with its sign.
    """

    key: str
    title: str
    digits: int | None = None
    interval: bool = False
    signed: bool = False


LINE = TableColumn("line", "line")
HEAT = TableColumn("temperature", "T", 1)
TASK = TableColumn("task", "task")


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row: its values by column, and its provenance."""

    values: Mapping[str, Value]
    provenance: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A table in long form.

    Attributes:
        keys: columns that identify a row; no two rows have the same values.
        across: a key whose values become columns when the table is printed; None prints the table as it is.
        shown: the column whose values are then shown in these columns.
        left_out: rows that are not printed, each with the columns that it lacks.
    """

    name: str
    title: str
    columns: Sequence[TableColumn]
    keys: Sequence[str]
    rows: Sequence[TableRow]
    note: str = ""
    across: str | None = None
    shown: str | None = None
    left_out: Sequence[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def table_of(
    name: str,
    title: str,
    columns: Sequence[TableColumn],
    keys: Sequence[str],
    rows: Sequence[TableRow],
    note: str = "",
    across: str | None = None,
    shown: str | None = None,
) -> PaperTable:
    """Make a table from the rows with complete provenance, and list the others."""
    places = [tuple(row.values[key] for key in keys) for row in rows]
    assert len(set(places)) == len(places), f"two rows of {name} have the same name"
    kept, left_out = [], []
    for row, place in zip(rows, places, strict=True):
        lacking = missing(row.provenance)
        if lacking:
            left_out.append(f"{', '.join(str(part) for part in place)}: the record lacks {', '.join(lacking)}")
        else:
            kept.append(row)
    return PaperTable(name, title, columns, keys, kept, note, across, shown, left_out)


def table_from(values: Mapping[str, Any]) -> PaperTable:
    """Make a table from the result of `as_json`."""
    columns = [TableColumn(**column) for column in values["columns"]]
    rows = [TableRow(**row) for row in values["rows"]]
    return PaperTable(**{**values, "columns": columns, "rows": rows})


def cell(column: TableColumn, values: Mapping[str, Value]) -> str:
    """Return the text of a cell; for a number with an interval, `2.41 (2.10 to 2.75)`."""
    value = values.get(column.key)
    if column.digits is None or isinstance(value, str):
        return ABSENT if value is None else str(value)
    ends = [values.get(f"{column.key}_{end}") for end in ("low", "high")] if column.interval else [None, None]
    texts = [_figure(part, column.digits, column.signed) for part in (value, *ends)]
    return texts[0] if None in ends or value is None else f"{texts[0]} ({texts[1]} to {texts[2]})"


def _figure(value: Any, digits: int, signed: bool) -> str:
    return f"{value:+,.{digits}f}" if signed and value is not None else number(value, digits)


def shared_and_differing(table: PaperTable) -> tuple[dict[str, str], list[str]]:
    """Return the provenance that all rows have in common, for the caption, and the columns in which they differ."""
    values = {
        name: list(dict.fromkeys(row.provenance[name] for row in table.rows))
        for name in (table.rows[0].provenance if table.rows else ())
    }
    shared = {name: str(found[0]) for name, found in values.items() if len(found) == 1}
    return shared, [name for name in values if name not in shared]
