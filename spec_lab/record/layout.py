"""Checks JSON that may be truncated, edited or from another version, and says in a line where it is wrong.

A layout is a type: a TypedDict, such as those of `record.schema` and `record.row_schema`, or the type of a value in
one. Additional keys are allowed, so that a record may hold more than this version reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

MAX_INTEGER = 2**53
"""A float64, in which many JSON readers keep numbers, represents integers up to this exactly."""
MAX_DEPTH = 32
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
LONGEST_SHOWN = 40


def parse_json(text: str | bytes) -> Any:
    """Read the value of a strict JSON text.

    Raises:
        ValueError: the text is not JSON, cannot be decoded, names a NaN or an infinity, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def misfit(value: Any, layout: Any, where: str = "") -> str | None:
    """Return the first misfit, such as `accuracy.value is "x", not a number or null`; None if everything fits."""
    return next(_misfits(value, layout, where), None)


def _misfits(value: Any, layout: Any, where: str) -> Iterator[str]:
    origin, parts = get_origin(layout), get_args(layout)
    if layout is Any:
        yield from _plain_misfits(value, where, MAX_DEPTH)
    elif origin in (Union, UnionType):
        yield from _misfits_of_choice(value, layout, where)
    elif is_typeddict(layout):
        yield from _misfits_of_keys(value, layout, where)
    elif origin is list and isinstance(value, list):
        # Most lists have thousands of ids, so do a fast check first, and look for the place only if it fails.
        if not all(_is_one(item, parts[0]) for item in value):
            for index, item in enumerate(value):
                yield from _misfits(item, parts[0], f"{where}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _misfits(item, parts[1], _below(where, key))
    elif not _is_one(value, layout):
        yield f"{where or 'it'} is {_show(value)}, not {in_words(layout)}"


def _misfits_of_choice(value: Any, layout: Any, where: str) -> Iterator[str]:
    """Find misfits of a union. One inside the value names its key; one of the whole value names all allowed types."""
    found = [misfit(value, part, where) for part in get_args(layout)]
    if None not in found:
        inside = [text for text in found if text and not text.startswith(f"{where or 'it'} is ")]
        yield inside[0] if inside else f"{where or 'it'} is {_show(value)}, not {in_words(layout)}"


def _misfits_of_keys(value: Any, layout: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where or 'it'} is {_show(value)}, not {in_words(layout)}"
        return
    for key, hint in _hints(layout).items():
        is_optional = get_origin(hint) is NotRequired or not layout.__total__
        part = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        if key in value:
            yield from _misfits(value[key], part, _below(where, key))
        elif not is_optional:
            yield f"{_below(where, key)} is missing"


def _plain_misfits(value: Any, where: str, depth: int) -> Iterator[str]:
    """Find misfits of any plain value: its nesting must be limited, and its numbers finite."""
    if depth == 0:
        yield f"{where or 'it'} is nested too deeply"
    elif isinstance(value, (dict, list)):
        inside: Iterable[tuple[str, Any]] = (
            ((_below(where, key), item) for key, item in value.items())
            if isinstance(value, dict)
            else ((f"{where}[{index}]", item) for index, item in enumerate(value))
        )
        for name, item in inside:
            yield from _plain_misfits(item, name, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where or 'it'} is {value}, not a finite number"


def _is_one(value: Any, layout: Any) -> bool:
    """Return whether `value` fits a layout that is a plain type or a `Literal` of texts."""
    if get_origin(layout) is Literal:
        return isinstance(value, str) and value in get_args(layout)
    if layout is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER
    if layout is float:
        return _is_one(value, int) or (isinstance(value, float) and math.isfinite(value))
    return layout in WORDS and isinstance(value, layout)


def in_words(layout: Any) -> str:
    """Describe what a layout allows, as in `a number or null`."""
    origin, parts = get_origin(layout), get_args(layout)
    if origin in (Union, UnionType):
        return " or ".join(in_words(part) for part in parts)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is list:
        return "a list"
    return WORDS.get(layout, "a set of keys") if isinstance(layout, type) else "a set of keys"


@cache
def _hints(layout: Any) -> Mapping[str, Any]:
    return get_type_hints(layout, include_extras=True)


def _below(where: str, key: str) -> str:
    return f"{where}.{_shorten(key)}" if where else _shorten(key)


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a set of keys" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        return "a number beyond 2**53"
    return _shorten(json.dumps(value))


def _shorten(text: str) -> str:
    """Make a text printable, of one line, and short."""
    shown = json.dumps(text)[1:-1] if not text.isprintable() else text
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
