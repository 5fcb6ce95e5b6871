"""Reads files with one JSON object in each line, with the place of each line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line of a file; `place` is `FILE:LINE`. `index` counts from 0, without empty lines."""

    place: str
    index: int
    text: str


def text_lines(path: Path) -> Iterator[TextLine]:
    """Yield the lines of a file, empty ones left out."""
    numbered = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1)
    filled = ((number, line) for number, line in numbered if line.strip())
    for index, (number, line) in enumerate(filled):
        yield TextLine(f"{path}:{number}", index, line)
