"""Reads JSON from outside so that a defect becomes a one-line error.

In checkpoints and prompt files from elsewhere, a value may be missing, of another type or absurdly large, or the file
may be truncated. Outside `spec_lab.train`, such JSON is read only through this module, which checks each value's type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError

# More than any model has; a larger size is a mistake, and building anything of that size would take forever.
LARGEST_SIZE = 2**31 - 1
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
    try:
        content = parse_json(path.read_text(encoding="utf-8"), no_key_twice)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as JSON ({reason}); fetch the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object, but holds a {type(content).__name__}")
    return content


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Typed access to the keys of a JSON object; JSON null counts as absent. `source` names the file in errors."""

    values: Mapping[str, Any]
    source: str

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """Read an integer from `least` to `most`."""
        value = self._value(key, default)
        if not is_integer(value) or value < least:
            kind = {0: "an integer of 0 or more", 1: "a positive integer"}.get(least, f"an integer of {least} or more")
            raise self._wrong(key, kind, value)
        if value > most:
            raise self._wrong(key, f"at most {most}", value)
        return int(value)

    def optional_integer(self, key: str, least: int = 0) -> int | None:
        """Read an integer of `least` or more, None if the key is absent."""
        return None if self.values.get(key) is None else self.integer(key, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._wrong(key, "a positive number", value)
        try:
            return float(value)
        except OverflowError as error:
            raise self._wrong(key, "a positive number", value) from error

    def epsilon(self, key: str, default: float | None = None) -> float:
        """Read an epsilon, such as the one that a norm adds to a mean of squares. Above 1 it is refused, since it would
        dominate the mean."""
        value = self.number(key, default)
        if value > 1:
            raise self._wrong(key, "at most 1", value)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Read a list of strings, empty if the key is absent."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value or ())

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Read a list of integers, None if the key is absent."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(is_integer(item) for item in value)):
            raise self._wrong(key, "a list of integers", value)
        return None if value is None else tuple(value)

    def object(self, key: str) -> dict[str, Any]:
        """Read a JSON object, empty if the key is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return dict(value or {})

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Read one id of the vocabulary or a list of them, empty if the key is absent."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(is_integer(token) and 0 <= token < vocab_size for token in ids):
            kind = f"an id of the {vocab_size} tokens, from 0 to {vocab_size - 1}, or a list of such ids"
            raise UserError(f"{self.source}: {key} must be {kind}, but is {shown_ids(ids)}")
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.source}: {key} is missing")
        return value

    def _wrong(self, key: str, kind: str, value: Any) -> UserError:
        return UserError(f"{self.source}: {key} must be {kind}, but is {shown(value)}")


def is_integer(value: Any) -> bool:
    """Return whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown_ids(ids: Sequence[Any]) -> str:
    """Return a few of the ids as text for an error."""
    few = ", ".join(shown(token) for token in ids[:4])
    return few if len(ids) <= 4 else f"{few} and {len(ids) - 4} more"


def _is_unicode(content: Any) -> bool:
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
