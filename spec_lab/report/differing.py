"""Finds the knobs in which runs differ, those of extensions too, so that no two rows are called alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from spec_lab.record.schema import Summary
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.origin import run_words

NAMED = ("name",)
"""Leaves that the name of a group says already."""


def knobs_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the value of every knob of a run by its dotted name, but for those that say how it is recorded."""
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
    """Return the knobs that have several values among `configs`; one that only some runs have differs too."""
    knobs = [knobs_of(config) for config in configs]
    names = dict.fromkeys(name for each in knobs for name in each)
    return [name for name in names if len({repr(each.get(name, Missing)) for each in knobs}) > 1]


def telling_apart(summaries: Sequence[Summary], names: Sequence[Hashable]) -> list[str]:
    """Return the knobs without which runs of the same name could not be told from each other."""
    alike: dict[Hashable, list[Mapping[str, Any]]] = defaultdict(list)
    for name, summary in zip(names, summaries, strict=True):
        alike[name].append(summary["config"])
    return list(dict.fromkeys(knob for configs in alike.values() for knob in differing_knobs(configs)))


def distinct_words(summaries: Sequence[Summary]) -> list[str]:
    """Say of each run what it drafts with, how it judges and what it prunes, and each knob in which runs of the same
    words differ."""
    words = [run_words(summary) for summary in summaries]
    knobs = telling_apart(summaries, words)
    return [
        ", ".join([word, *(f"{knob}={value}" for knob in knobs if (value := knob_value(summary, knob)) is not None)])
        for word, summary in zip(words, summaries, strict=True)
    ]


def knob_value(summary: Summary, knob: str) -> Any:
    """Return the value of a knob by its dotted name; None where the run has no such knob."""
    return knobs_of(summary["config"]).get(knob)


class Missing:
    """Stands for a knob that a run does not have, which may be null in another."""
