"""The numbers that a knob takes: bounds in its dataclass field, and the check that reads them.

The check works for any configuration made of dataclasses, so that runs and trainings are checked in the same way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BOUNDS = "bounds"
"""The key of a field's `Bounds` in its metadata."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a knob takes: at least `least`, at most `most`, greater than `above`. None is no bound."""

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def admits(self, number: float) -> bool:
        """Return whether `number` can be computed with and is within the bounds."""
        return (
            _is_ordinary(number)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
        )

    def nearest(self, number: float) -> float | None:
        """Return `least` or `most` if the number is beyond it, else None. `above` is not itself allowed."""
        beyond = (self.least, self.most)
        sides = (self.least is not None and number < self.least, self.most is not None and number > self.most)
        return next((bound for bound, is_beyond in zip(beyond, sides, strict=True) if is_beyond), None)

    def in_words(self) -> str:
        """Return the text for help and refusals: "at least 1", "above 0 and at most 1"; empty if there are no
        bounds."""
        sides = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return " and ".join(f"{side} {bound}" for side, bound in sides if bound is not None)


def bounds_of(field: dataclasses.Field[Any]) -> Bounds:
    """Return the bounds of a schema's field; a field that was not made by `knob` has none."""
    bounds: Bounds = field.metadata.get(BOUNDS, Bounds())
    return bounds


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a schema's field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def out_of_bounds(config: Any, prefix: str = "") -> list[str]:
    """Return a line for every field of `config`, a dataclass instance, with a number that the field does not take.

    NaN, infinities and integers beyond 64 bits are refused in every field. Lists in lists are not checked. `prefix` is
    the dotted name of `config` in a larger configuration, with a trailing dot.
    """
    fields = dataclasses.fields(config)
    return [line for field in fields for line in _refusals(field, getattr(config, field.name), prefix)]


def _refusals(field: dataclasses.Field[Any], value: Any, prefix: str) -> Iterator[str]:
    name = prefix + field.name
    if dataclasses.is_dataclass(value):
        yield from out_of_bounds(value, f"{name}.")
        return
    bounds, is_list = bounds_of(field), isinstance(value, list)
    numbers = [number for number in (value if is_list else [value]) if _is_number(number)]
    if all(bounds.admits(number) for number in numbers):
        return
    shown = f"[{','.join(map(str, value))}]" if is_list else value
    subject = "each of them must be" if is_list else "must be"
    wanted = ["" if all(map(_is_ordinary, numbers)) else "a finite number of 64 bits", bounds.in_words()]
    remedy = _written(_replacement(field, value, bounds))
    yield f"{name}={shown}: {subject} {', '.join(filter(None, wanted))}; use {name}={remedy}"


def _replacement(field: dataclasses.Field[Any], value: Any, bounds: Bounds) -> Any:
    """Return the allowed value nearest to a refused one, or the default if there is none."""
    default = default_of(field)
    if not isinstance(value, list):
        nearest = bounds.nearest(value)
        return default if nearest is None else nearest
    entries = [entry if bounds.admits(entry) else bounds.nearest(entry) for entry in value]
    return default if None in entries else entries


def _written(value: Any) -> str:
    """Write a value as it is typed."""
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return "null" if value is None else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_ordinary(number: float) -> bool:
    """Return whether torch and C can represent a number: it is finite, and fits in 64 bits if it is an integer."""
    return abs(number) < 2**63 if isinstance(number, int) else math.isfinite(number)
