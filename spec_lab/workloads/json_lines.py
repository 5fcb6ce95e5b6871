"""Reads files with one JSON object in each line, with the place of each line for error messages."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.json_input import no_key_twice, parse_json
from spec_lab.core.errors import UserError
from spec_lab.workloads.unusable import UnusablePrompt

PACKED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ": "unxz", b"PK\x03\x04": "unzip"}
"""The command that unpacks a file, by the first bytes of the file."""


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line of a file; `place` is `FILE:LINE`. `index` counts from 0, without empty lines."""

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
    _refuse_array(path, text)
    numbered = enumerate(text.split("\n"), start=1)
    filled = ((number, line) for number, line in numbered if line.strip())
    for index, (number, line) in enumerate(filled):
        yield TextLine(f"{path}:{number}", index, line)


def _refuse_array(path: Path, text: str) -> None:
    """Raise UserError for a file that is one array of objects, such as the ShareGPT file in circulation."""
    first = text.lstrip().partition("\n")[0]
    if not first.startswith("["):
        return
    rows, refused = _parsed(text), f"{path} is one JSON array, but each line must be an object"
    if rows is None and _parsed(first) is None:
        raise UserError(f"{refused}; the array cannot be read either; it may be cut short, so fetch it again")
    if not rows or not all(isinstance(row, dict) for row in rows):
        return
    program = 'python -c "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]"'
    # The output gets a name that no file has: a shell empties the file that it writes to before the program reads.
    written = next(name for name in (f"{path.stem}{'_' * n}.jsonl" for n in count()) if not Path(name).exists())
    source, lines = (shlex.quote(str(name)) for name in (path, written))
    raise UserError(f"{refused}; write it with: {program} < {source} > {lines}")


def _parsed(text: str) -> list[Any] | None:
    """Return the array in a JSON text; None if the text is not an array."""
    try:
        rows = parse_json(text)
    except ValueError:
        return None
    return rows if isinstance(rows, list) else None


def json_object(line: TextLine) -> dict[str, Any]:
    """Return the object in a line; UnusablePrompt if it is not an object."""
    try:
        row = parse_json(line.text, no_key_twice)
    except ValueError as error:
        raise UnusablePrompt(f"{line.place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UnusablePrompt(f"{line.place} is not a JSON object")
    return row


def _utf8_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        packed = next((tool for sign, tool in PACKED.items() if error.object.startswith(sign)), None)
        if packed is not None:
            raise UserError(f"{path} is packed; unpack it with {packed}, and name the unpacked file") from error
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}: {error.reason}); save it as UTF-8") from error
