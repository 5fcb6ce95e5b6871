"""Files of one JSON object a line, each with the place it stands at, so that a refusal can name it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.errors import UserError
from spec_lab.models.json_input import parse_json


@dataclass(frozen=True, slots=True)
class JsonLine:
    """One object of a file; `place` is `FILE:LINE`."""

    place: str
    row: dict[str, Any]


def json_lines(path: Path) -> Iterator[JsonLine]:
    """The objects of a file, empty lines left out.

    Raises:
        UserError: no such file, a file that is not UTF-8, or a line that is no JSON object.
    """
    if not path.is_file():
        raise UserError(f"workload.path: no file {path}")
    for number, line in enumerate(_utf8_text(path).split("\n"), start=1):
        if line.strip():
            yield _json_line(f"{path}:{number}", line)


def _json_line(place: str, text: str) -> JsonLine:
    try:
        row = parse_json(text)
    except ValueError as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is not a JSON object")
    return JsonLine(place, row)


def _utf8_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}: {error.reason}); save it as UTF-8") from error
