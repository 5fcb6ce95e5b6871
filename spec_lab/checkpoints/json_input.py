"""Reads JSON: a config.json by its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def present(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys whose value is not null, which counts as absent in config.json."""
    return {key: value for key, value in keys.items() if value is not None}


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
