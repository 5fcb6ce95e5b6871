"""Keeps the lines of finished cells in a CSV file, so that a cell once measured is not measured again."""

from __future__ import annotations

import csv
from pathlib import Path


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
