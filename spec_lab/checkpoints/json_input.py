"""Reads a config.json, and refuses of it what would otherwise give wrong numbers in silence."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
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


def refuse_values(source: str, values: Mapping[str, Any], supported: Mapping[str, Collection[Any]]) -> None:
    """Raise UserError for values that would change the arithmetic in a way that the forward code lacks.

    A key that is missing or null has its default. `supported` names the values of each key; a key without any is
    never read.
    """
    wrong = {key: known for key, known in supported.items() if values.get(key) is not None and values[key] not in known}
    if wrong:
        said = "; ".join(
            f"{key} {values[key]!r} is not supported" + (f", only {', '.join(map(repr, known))}" if known else "")
            for key, known in wrong.items()
        )
        raise UserError(f"{source}: {said}")


def refuse_other_target(source: str, target: object, **values: Any) -> None:
    """Raise UserError if a drafter's `values` differ from the fields of the target, or of its layer, with these
    names."""
    pairs = {name: (ours, getattr(target, name)) for name, ours in values.items()}
    differing = [f"{name} is {ours}, the target has {its}" for name, (ours, its) in pairs.items() if ours != its]
    if differing:
        raise UserError(f"{source}: trained for another target ({'; '.join(differing)})")
