"""The numbers of a record by dotted names, for optimising or plotting one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from spec_lab.record.schema import Origin, Summary

PREFIX = "summary."
HEADLINE = "value"
"""Names leave this key out: `summary.speedup` is the speedup's `value`, and `summary.speedup.low` its `low`."""
VARYING = tuple(f"{PREFIX}{part}." for part in ("acceptance_rate_by_position", "stage_ms_per_round", "metrics"))
"""How the names begin that depend on the run."""
NOT_RESULTS = {*Origin.__annotations__, "schema_version"}


@cache
def scalar_paths() -> dict[str, tuple[str, ...]]:
    """Return the path of each result in `summary.json`, by its name: `summary.speedup` is at `("speedup", "value")`.

    Numbers in lists and those whose keys depend on the run (categories, references, stages, metrics) are not included.
    """
    paths = {}
    for path in _number_paths(Summary, ()):
        if path[0] not in NOT_RESULTS:
            shown = path[:-1] if path[-1] == HEADLINE else path
            paths[PREFIX + ".".join(shown)] = path
    return paths


def scalar(summary: Mapping[str, Any], name: str) -> float | None:
    """Return the number called `name` in a record; None if the run does not have it."""
    value: Any = summary
    for key in scalar_paths()[name]:
        value = None if value is None else value.get(key)
    return value


def scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that a record has, by name: those of `scalar_paths`, and those of each position, stage and
    metric."""
    found = {name: scalar(summary, name) for name in scalar_paths()} | dict(_varying(summary))
    return {name: value for name, value in found.items() if value is not None}


def _varying(summary: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers whose names depend on the run."""
    for kind in ("unconditional", "conditional"):
        for place, rate in enumerate(summary["acceptance_rate_by_position"][kind], start=1):
            yield f"{PREFIX}acceptance_rate_by_position.{kind}.{place}", rate
    for stage, milliseconds in summary["stage_ms_per_round"].items():
        yield f"{PREFIX}stage_ms_per_round.{stage}", milliseconds
    for metric, value in summary.get("metrics", {}).items():
        yield f"{PREFIX}metrics.{metric}", value


def _number_paths(schema: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, annotation in get_type_hints(schema).items():
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        for kind in kinds:
            if is_typeddict(kind):
                yield from _number_paths(kind, (*above, key))
            elif kind in (int, float):
                yield (*above, key)
