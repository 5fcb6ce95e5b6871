"""Keeps what goes in and out of W&B's search code to values that JSON, YAML and a command line can all carry."""

from __future__ import annotations

import math
from typing import Any

MOST_VALUES = 10_000


def plain_problem(content: Any) -> str | None:
    """Says why a YAML's content cannot be a sweep, naming the key, or None.

    Aliases may make the content endless, so its values are counted.
    """
    pending: list[tuple[str, Any]] = [("", content)]
    for _ in range(MOST_VALUES):
        if not pending:
            return None
        place, value = pending.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    return f"{_below(place, repr(key))}: this key is no text; quote it"
                pending.append((_below(place, key), item))
        elif isinstance(value, list):
            pending += [(place, item) for item in value]
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{place}: {value} is no finite number; use one"
        elif not isinstance(value, (str, int, float, bool, type(None))):
            return f"{place}: {value!s} is a {type(value).__name__}; quote it if a text is meant"
    return f"it has more than {MOST_VALUES} values; make it smaller"


def to_plain(value: Any) -> Any:
    """Python's own number for one of numpy's; everything else as it is."""
    return value.item() if hasattr(value, "item") else value


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
