"""The options that a report treats apart, and how it calls rules and graph modes.

It knows them by name and not by a row, since a record may be of an extension that is not installed here. Whatever is
not named here is called as its run calls it.
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
"""They stand in the order of what they capture; one of an extension comes last."""


class RuleWords(NamedTuple):
    """A rule as tables call it.

    Attributes:
        rule: such as `top 10, delta 0.6`.
        family: the rule without its threshold, such as `top 10, delta`.
        threshold: None for a rule without one.
    """

    rule: str
    family: str
    threshold: float | None


def describe_rule(summary: Summary) -> RuleWords:
    """Say the rule of a run in words."""
    options: Mapping[str, Any] = summary["config"].get("acceptance", {})
    name = options.get("name", ABSENT)
    if name != RELAXED:
        return RuleWords(summary["choices"].get("acceptance", name), name, None)
    form, phase = options["form"], options.get("phase", "token")
    family, suffix = f"top {options['topk']}, {form}", "" if phase == "token" else f", phase={phase}"
    return RuleWords(f"{family} {options[form]:g}{suffix}", family + suffix, options[form])


def describe_mode(summary: Summary) -> str:
    """Say the graph mode of a run in words, with what is not as usual: `round, overlap`."""
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
    """Return the place of a mode in a table, by what it captures; `mode` as `describe_mode` calls it."""
    name = mode.partition(",")[0]
    return GRAPH_MODES.index(name) if name in GRAPH_MODES else len(GRAPH_MODES)
