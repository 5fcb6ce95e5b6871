"""The options that a report treats specially, and its names for rules and graph modes.

It identifies them by name, since a record may use an extension that is not installed here. Options not listed here are
shown under the name in the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from spec_lab.record.schema import Summary
from spec_lab.record.wording import ABSENT

STRICT = "strict"
"""The rule that lossy ones are compared with."""
RELAXED = "relaxed_thinking"

ORACLE = "oracle"
"""The upper bound of acceptance: its drafts are always right."""
BOUNDS = (ORACLE, "random")

EAGER = "eager"
"""The graph mode that others are compared with."""
GRAPH_MODES = (EAGER, "split_seed", "step_replay", "full_loop", "round")
"""In ascending order of how much they capture; modes of extensions come last."""


class RuleWords(NamedTuple):
    """A rule's name in tables.

    Attributes:
        rule: such as `top 10, delta 0.6`.
        family: the rule without its threshold, such as `top 10, delta`.
        threshold: None for a rule without one.
    """

    rule: str
    family: str
    threshold: float | None


def describe_rule(summary: Summary) -> RuleWords:
    """Return the name of a run's rule."""
    options: Mapping[str, Any] = summary["config"].get("acceptance", {})
    name = options.get("name", ABSENT)
    if name != RELAXED:
        return RuleWords(summary["choices"].get("acceptance", name), name, None)
    form, phase = options["form"], options.get("phase", "token")
    family, suffix = f"top {options['topk']}, {form}", "" if phase == "token" else f", phase={phase}"
    return RuleWords(f"{family} {options[form]:g}{suffix}", family + suffix, options[form])


def describe_mode(summary: Summary) -> str:
    """Return the name of a run's graph mode, with those of four settings that are not the default: `round, overlap`. A
    mode of an extension has the name in the record."""
    graph: Mapping[str, Any] = summary["config"]["graph"]
    if graph["name"] not in GRAPH_MODES:
        return summary["choices"].get("graph", graph["name"])
    num_rounds = graph.get("rounds_per_replay", 1)
    marks = {
        f"{num_rounds} a replay": num_rounds > 1,
        "overlap": graph.get("overlap", False),
        "stale metadata": graph.get("metadata", "in_place") == "stale",
        "verify not captured": graph.get("verify", True) is False,
    }
    return ", ".join([graph["name"], *(mark for mark, is_set in marks.items() if is_set)])


def place_of_mode(mode: str) -> int:
    """Return the position of a mode in a table, by how much it captures; `mode` is what `describe_mode` returns."""
    name = mode.partition(",")[0]
    return GRAPH_MODES.index(name) if name in GRAPH_MODES else len(GRAPH_MODES)
