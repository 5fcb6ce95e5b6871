"""Covering arrays: a few rows in which every two values of different factors meet, in the place of a whole product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def covering_array(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Return rows that hold every pair of values that some allowed row holds, chosen greedily, the same at each call.

    Args:
        allowed: tells of a row, of which some factors may be missing, whether its values may stand together.
    """
    fields = [(name, value) for name, values in factors.items() for value in values]
    missing = {pair: None for pair in combinations(fields, 2) if pair[0][0] != pair[1][0]}
    uses = dict.fromkeys(fields, 0)

    def complete(row: Row) -> Row | None:
        name = next((name for name in factors if name not in row), None)
        if name is None:
            return row

        def gain(value: Any) -> tuple[int, int]:
            fresh = ((other, (name, value)) for other in row.items())
            return sum(pair in missing or pair[::-1] in missing for pair in fresh), -uses[name, value]

        tries = ({**row, name: value} for value in sorted(factors[name], key=gain, reverse=True))
        return next((found for trial in tries if allowed(trial) and (found := complete(trial))), None)

    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        del missing[first]
        row = complete(dict(first)) if allowed(dict(first)) else None
        if row is None:
            continue
        rows.append(row)
        held = [(name, row[name]) for name in factors]
        for pair in combinations(held, 2):
            missing.pop(pair, None)
        for entry in held:
            uses[entry] += 1
    return rows


def each_value(*axes: Iterable[Any], times: int = 1) -> list[tuple[Any, ...]]:
    """Return as few rows as hold every value of each axis `times` times, the axes turned against each other.

    For axes that other tests cross, or whose pairs share no code.
    """
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    rows = [
        tuple(axis[(number + number // longest * place) % len(axis)] for place, axis in enumerate(values))
        for number in range(times * longest)
    ]
    return [row for place, row in enumerate(rows) if row not in rows[:place]]
