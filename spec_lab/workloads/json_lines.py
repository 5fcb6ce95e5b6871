"""Files of one JSON object a line, each with the place it stands at, so that a refusal can name it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.json_input import no_key_twice, parse_json
from spec_lab.core.errors import UserError
from spec_lab.core.regular import regular_text
from spec_lab.workloads.unusable import UnusablePrompt


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line of a file; `place` is `FILE:LINE`, and `index` counts lines that are not empty from 0."""

    place: str
    index: int
    text: str


def text_lines(path: Path) -> Iterator[TextLine]:
    """Yield the lines of a file, empty ones left out.

    Raises:
        UserError: no such file, a file that is not UTF-8, or one array of objects.
    """
    if not path.is_file():
        raise UserError(f"workload.path: no file {path}")
    text = _utf8_text(path)
    if _is_array(text):
        written = f"[print(json.dumps(row)) for row in json.load(open('{path}'))]"
        raise UserError(
            f"{path} is one JSON array, and an object a line is read; "
            f'write it so: python -c "import json; {written}" > {path.stem}.jsonl'
        )
    numbered = enumerate(text.split("\n"), start=1)
    filled = ((number, line) for number, line in numbered if line.strip())
    for index, (number, line) in enumerate(filled):
        yield TextLine(f"{path}:{number}", index, line)


def _is_array(text: str) -> bool:
    """Tell whether a file is one array of objects, as the ShareGPT file that is passed around."""
    if not text.lstrip().startswith("["):
        return False
    try:
        rows = parse_json(text)
    except ValueError:
        return False
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)


def json_object(line: TextLine) -> dict[str, Any]:
    """Return the object of a line; UnusablePrompt where it is none."""
    try:
        row = parse_json(line.text, no_key_twice)
    except ValueError as error:
        raise UnusablePrompt(f"{line.place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UnusablePrompt(f"{line.place} is not a JSON object")
    return row


def _utf8_text(path: Path) -> str:
    try:
        return regular_text(path, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}: {error.reason}); save it as UTF-8") from error
