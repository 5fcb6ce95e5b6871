"""Keeps the values that go to W&B's search code, or come from it, to those that JSON, YAML and a command line can
represent: it refuses others, and converts numpy's numbers."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

MOST_VALUES = 10_000


def plain_problem(content: Any) -> str | None:
    """Return why the content of a YAML file cannot be a sweep, with the key, or None.

    Aliases may make the content infinite, so the number of values is limited.
    """
    pending: list[tuple[str, Any]] = [("", content)]
    for _ in range(MOST_VALUES):
        if not pending:
            return None
        place, value = pending.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    return f"{_below(place, repr(key))}: this key is not a text; quote it"
                pending.append((_below(place, key), item))
        elif isinstance(value, list):
            pending += [(place, item) for item in value]
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{place}: {value} is not a finite number; use one"
        elif not isinstance(value, (str, int, float, bool, type(None))):
            return f"{place}: {value!s} is a {type(value).__name__}; quote it if a text is meant"
    return f"it has more than {MOST_VALUES} values; make it smaller"


def to_plain(value: Any, quantum: float | None = None) -> Any:
    """Return a Python number for one of numpy's, and other values unchanged.

    Args:
        quantum: `q` of its distribution; numbers are multiples of it. The number is rounded to as many digits,
            since a product such as 7 * 0.05 has more (0.35000000000000003).
    """
    plain = value.item() if hasattr(value, "item") else value
    if quantum is None or not isinstance(plain, float):
        return plain
    exponent = Decimal(str(quantum)).as_tuple().exponent
    assert isinstance(exponent, int), "a quantum is a finite number"
    return round(plain, max(-exponent, 0))


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
