"""Keeps the lines of finished cells in a CSV file, so that a cell once measured is not measured again."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from cell_checks import ACell

from spec_lab.core.errors import UserError


def read_rows(table: Path) -> list[dict[str, str]]:
    """Read the lines of finished cells."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append_row(table: Path, row: dict[str, str]) -> None:
    """Add a line, under a header where the file is new."""
    table.parent.mkdir(parents=True, exist_ok=True)
    is_new = not table.exists()
    with table.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def run_missing(cells: Iterable[ACell], table: Path, measure: Callable[[ACell], dict[str, str]]) -> bool:
    """Measure the cells that have no line in the table yet, one after another; return whether any was refused."""
    failed = False
    for cell in cells:
        if cell.name not in {row["cell"] for row in read_rows(table)}:
            try:
                append_row(table, measure(cell))
            except UserError as error:
                print(f"{cell.name}: {error}", file=sys.stderr)
                failed = True
    return failed
