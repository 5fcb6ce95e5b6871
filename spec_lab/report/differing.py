"""Finds the knobs in which runs differ, including those of extensions, so that no two rows have the same label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from spec_lab.record.schema import Summary
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.origin import run_words

NAMED = ("name",)
"""Last parts of knob names that are left out, since the group's name already says the value."""


def knobs_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the value of every knob of a run by its dotted name, except those that say how it is recorded."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in BESIDE_THE_RUN:
            continue
        if isinstance(value, Mapping):
            found |= knobs_of(value, f"{prefix}{key}.")
        elif not prefix or key not in NAMED:
            found[prefix + key] = value
    return found


def differing_knobs(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the knobs that have several values among `configs`; a knob that only some runs have counts as
    differing."""
    knobs = [knobs_of(config) for config in configs]
    names = dict.fromkeys(name for each in knobs for name in each)
    return [name for name in names if len({repr(each.get(name, Missing)) for each in knobs}) > 1]


def telling_apart(summaries: Sequence[Summary], names: Sequence[Hashable]) -> list[str]:
    """Return the knobs that are needed to distinguish runs with the same name."""
    alike: dict[Hashable, list[Mapping[str, Any]]] = defaultdict(list)
    for name, summary in zip(names, summaries, strict=True):
        alike[name].append(summary["config"])
    return list(dict.fromkeys(knob for configs in alike.values() for knob in differing_knobs(configs)))


def distinct_words(summaries: Sequence[Summary]) -> list[str]:
    """Describe each run's drafter, acceptance rule and pruning, and add each knob in which runs with the same
    description differ."""
    words = [run_words(summary) for summary in summaries]
    knobs = telling_apart(summaries, words)
    return [
        ", ".join([word, *(f"{knob}={value}" for knob in knobs if (value := knob_value(summary, knob)) is not None)])
        for word, summary in zip(words, summaries, strict=True)
    ]


def knob_value(summary: Summary, knob: str) -> Any:
    """Return the value of a knob by its dotted name; None if the run has no such knob."""
    return knobs_of(summary["config"]).get(knob)


class Missing:
    """Marks a knob that a run does not have, as distinct from a knob that is null."""
