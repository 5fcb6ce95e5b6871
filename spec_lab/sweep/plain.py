"""Turns what goes in and out of W&B's search code into values that JSON, YAML and a command line can all carry."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

MOST_VALUES = 10_000


def plain_problem(content: Any) -> str | None:
    """Say why a YAML's content cannot be a sweep, naming the key, or None.

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


def to_plain(value: Any, quantum: float | None = None) -> Any:
    """Return Python's own number for one of numpy's, and everything else as it is.

    Args:
        quantum: of which a number is a multiple, `q` of its distribution; it gets no more digits than that has, since a
            product such as 7 * 0.05 has them (0.35000000000000003).
    """
    plain = value.item() if hasattr(value, "item") else value
    if quantum is None or not isinstance(plain, float):
        return plain
    exponent = Decimal(str(quantum)).as_tuple().exponent
    assert isinstance(exponent, int), "a quantum is a finite number"
    return round(plain, max(-exponent, 0))


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
