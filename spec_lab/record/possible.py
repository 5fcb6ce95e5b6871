"""Finds numbers of a record that no measurement can give, such as an acceptance length of -3.

A layout gives the type of a value, and this module its range. Any number not named here is taken to be a count, a time
or a rate, which is at least 0. So numbers added in later versions are checked too. An extension's metric may be any
finite number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from spec_lab.record.row_schema import RequestRow, RoundRow
from spec_lab.record.schema import Summary

FREE = ("name", "choices", "config", "versions", "definitions", "extensions")
"""Keys of a summary that hold no measurements."""
METRICS = "metrics"
SIGNED = ("margin", "median_margin")
SHARES = ("conditional", "unconditional", "equal_to_plain", "gpu_idle_share", "share")
"""Numbers between 0 and 1; so are `value`, `low` and `high` inside ACCURACY."""
ACCURACY, CHANGE = "accuracy", "accuracy_change"
LENGTHS = ("acceptance_length", "acceptance_length_all")
ROUNDING = 1e-9


def impossible_numbers(summary: Summary) -> Iterator[str]:
    """Yield a line for each impossible number or interval in a summary, and for a start that is not a time."""
    longest = (summary["num_draft_tokens"] or 0) + 1.0
    yield from _impossible({key: value for key, value in summary.items() if key not in FREE}, "", "", longest)
    config = summary["config"]
    for key in ("batch_size", "max_new_tokens"):
        if config.get(key, 1) < 1:
            yield f"config.{key} is {config[key]}, but is at least 1 in any run"
    if (num_drafts := config.get("drafter", {}).get("num_draft_tokens", 0)) < 0:
        yield f"config.drafter.num_draft_tokens is {num_drafts}, but is at least 0 in any run"
    try:
        datetime.fromisoformat(summary["started_at"])
    except ValueError:
        yield "started_at is not a time such as 2026-01-02T03:04:05+00:00"


def impossible_request(row: RequestRow) -> Iterator[str]:
    """Yield what is impossible in a line of `requests.jsonl`."""
    yield from _impossible(row, "", "", math.inf)
    offered = row.get("offered_per_round") or []
    if any(most < count for count, most in zip(row["accepted_per_round"], offered, strict=False)):
        yield "accepted_per_round has more drafts than offered_per_round"
    confidences = row.get("confidence_per_round") or []
    if any(len(numbers) != count for numbers, count in zip(confidences, offered, strict=False)):
        yield "confidence_per_round does not have a number for each of the offered_per_round"
    if any(not 0 <= number <= 1 for numbers in confidences for number in numbers):
        yield "confidence_per_round has a number that is not between 0 and 1"


def impossible_round(row: RoundRow) -> Iterator[str]:
    """Yield what is impossible in a line of `rounds.jsonl`."""
    yield from _impossible(row, "", "", math.inf)
    for key in ("accepted", "emitted", "truncated"):
        if len(row[key]) != len(row["request_ids"]):
            yield f"{key} does not have an entry for each of {len(row['request_ids'])} request_ids"


def _impossible(value: Any, where: str, inside: str, longest: float) -> Iterator[str]:
    """Check the numbers, lists of numbers and intervals in a set of keys, and in the sets of keys below.

    Args:
        where: the dotted place of `value`.
        inside: the last key of that place.
        longest: the largest acceptance length.
    """
    yield from _disorder(value, where)
    for key, item in value.items():
        place = f"{where}.{key}" if where else key
        least, most = _bounds(key, inside, longest)
        for number in _numbers(item):
            if not least - ROUNDING <= number <= most + ROUNDING:
                yield f"{place} is {number:g}, but is between {least:g} and {most:g} in any run"
                break
        for each in [item] if isinstance(item, dict) else item if isinstance(item, list) else []:
            if isinstance(each, dict) and key != METRICS:
                yield from _impossible(each, place, key, longest)


def _numbers(value: Any) -> list[float]:
    """Return a number, or the smallest and the largest number of a list."""
    numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, (int, float))]
    return [min(numbers), max(numbers)] if numbers else []


def _bounds(key: str, inside: str, longest: float) -> tuple[float, float]:
    if key in SIGNED:
        return -math.inf, math.inf
    if inside == CHANGE and key in ("difference", "low", "high"):
        return -1.0, 1.0
    if key in SHARES or (inside == ACCURACY and key in ("value", "low", "high")):
        return 0.0, 1.0
    return (1.0, longest) if key in LENGTHS else (0.0, math.inf)


def _disorder(value: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield intervals that end before they begin, or do not include their value."""
    ends = [number for key in ("low", "value", "high") if isinstance(number := value.get(key), (int, float))]
    if any(second < first - ROUNDING for first, second in pairwise(ends)):
        yield f"{where} has low, value and high in another order"
