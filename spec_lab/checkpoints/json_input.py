"""Reads JSON: a config.json by its keys, and documents whose defects are told in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError

MAX_SHOWN = 60
MakeObject = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def shown(value: Any) -> str:
    """Return the value as text for an error: short and in one line."""
    # A container is shown by its type, since `repr` fails on one that is nested a thousand levels deep.
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**MAX_SHOWN else "a very long integer"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object from its pairs; ValueError if a key has two different values (Python would keep the last)."""
    made = dict(pairs)
    if len(made) < len(pairs):
        for key, value in pairs:
            if made[key] != value:
                raise ValueError(f"the key {shown(key)} occurs twice, with {shown(value)} and {shown(made[key])}")
    return made


def parse_json(text: str, make: MakeObject | None = None) -> Any:
    """Parse a JSON document. If `make` is given, it makes the objects from their pairs.

    Raises:
        ValueError: the text is not JSON, its nesting or an integer is too large for Python, or it has half of a
            surrogate pair, which no file or terminal can show. The error is one line.
    """
    try:
        content = json.loads(text, object_pairs_hook=make)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(" ".join(str(error).split()).split("; use sys.")[0]) from error
    if "\\ud" in text.lower() and not _is_unicode(content):
        raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff), which is not text")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The keys of a JSON object with defaults; JSON null counts as absent. `source` names the file in errors."""

    values: Mapping[str, Any]
    source: str

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, default))

    def optional_integer(self, key: str) -> int | None:
        """Read an integer, None if the key is absent."""
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, default))

    def required(self, key: str) -> tuple[int, ...]:
        """Read a list of integers that must be there."""
        return tuple(self._value(key, None))

    def flag(self, key: str, default: bool | None = False) -> bool:
        """Read true or false. Without a default the key must be there."""
        return bool(self._value(key, default))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._value(key, default))

    def texts(self, key: str) -> tuple[str, ...]:
        """Read a list of strings, empty if the key is absent."""
        return tuple(self.values.get(key) or ())

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Read a list of integers, None if the key is absent."""
        value = self.values.get(key)
        return None if value is None else tuple(value)

    def object(self, key: str) -> dict[str, Any]:
        """Read a JSON object, empty if the key is absent."""
        return dict(self.values.get(key) or {})

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read one token id or a list of them, empty if the key is absent."""
        value = self.values.get(key)
        return tuple(value) if isinstance(value, list) else () if value is None else (value,)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.source}: {key} is missing")
        return value


def is_integer(value: Any) -> bool:
    """Return whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_unicode(content: Any) -> bool:
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
