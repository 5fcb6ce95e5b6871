"""Finds the options and knobs in which runs differ, also those of extensions, so that they get different labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from spec_lab.record.schema import Summary
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.origin import run_words

OPTION = "name"
"""The key of a group that holds the name of the chosen option."""


def knobs_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the value of every knob of a run by its dotted name, without `BESIDE_THE_RUN` and the names of options."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in BESIDE_THE_RUN:
            continue
        if isinstance(value, Mapping):
            found |= knobs_of(value, f"{prefix}{key}.")
        elif not prefix or key != OPTION:
            found[prefix + key] = value
    return found


def differing_knobs(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the knobs that have several values among `configs`; a knob that only some runs have counts as
    differing."""
    return _differing([knobs_of(config) for config in configs])


def telling_apart(summaries: Sequence[Summary], labels: Sequence[Hashable]) -> list[str]:
    """Return the groups and knobs in which runs with the same label differ; `labels` has one for each run."""
    alike: dict[Hashable, list[dict[str, Any]]] = defaultdict(list)
    for label, summary in zip(labels, summaries, strict=True):
        alike[label].append(_options_and_knobs(summary))
    return list(dict.fromkeys(name for values in alike.values() for name in _differing(values)))


def distinct_words(summaries: Sequence[Summary]) -> list[str]:
    """Describe each run's drafter, acceptance rule and pruning, and add each option and knob in which runs with the
    same description differ."""
    words = [run_words(summary) for summary in summaries]
    knobs = telling_apart(summaries, words)
    return [
        ", ".join([word, *(f"{knob}={value}" for knob in knobs if (value := knob_value(summary, knob)) is not None)])
        for word, summary in zip(words, summaries, strict=True)
    ]


def knob_value(summary: Summary, knob: str) -> Any:
    """Return the value of a knob by its dotted name, or the option of a group; None if the run has no such knob."""
    return _options_and_knobs(summary).get(knob)


def _options_and_knobs(summary: Summary) -> dict[str, Any]:
    config = summary["config"]
    groups = {group: part for group, part in config.items() if isinstance(part, Mapping) and OPTION in part}
    options = {group: part[OPTION] for group, part in groups.items() if group not in BESIDE_THE_RUN}
    return options | knobs_of(config)


def _differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for values in runs for name in values)
    return [name for name in names if len({repr(values.get(name, Missing)) for values in runs}) > 1]


class Missing:
    """Marks a knob that a run does not have, as distinct from a knob that is null."""
