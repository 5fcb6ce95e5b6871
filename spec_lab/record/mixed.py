"""Says if `auto` chose different options for runs that are compared, since these options also change the times.

`auto` chooses for each run separately, and a fast option may not suit all runs of a sweep. The option that runs
anywhere is not silently used for all of them. Instead the difference is reported, and the option that suits all is
named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RUNS_ANYWHERE = {"attention": "torch", "kernels": "torch", "graph": "eager"}
"""The knobs for which `auto` chooses an option at composition, each with the option that suits every run."""


def taken_by_auto(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that `auto` chose, as in `{"kernels": "native", "graph": "eager"}`.

    Args:
        config: the config in a record.
    """
    names = config.get("auto", [])
    return {name: option_of(config, name) for name in RUNS_ANYWHERE if name in names and name in config}


def option_of(config: Mapping[str, Any], name: str) -> str:
    """Return the option of a group, or the value of a knob."""
    part = config[name]
    return str(part["name"] if isinstance(part, Mapping) else part)


def are_mixed(config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether `auto` chose different options for the two."""
    ours, theirs = taken_by_auto(config), taken_by_auto(other)
    return any(ours[name] != theirs[name] for name in ours.keys() & theirs.keys())


def mixed_by_auto(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a line for each knob for which `auto` chose several options."""
    taken = [taken_by_auto(config) for config in configs]
    found = {name: dict.fromkeys(options[name] for options in taken if name in options) for name in RUNS_ANYWHERE}
    return {name: _line(name, list(options)) for name, options in found.items() if len(options) > 1}


def _line(name: str, options: Sequence[str]) -> str:
    some = " and for others ".join(f"{name}={option}" for option in options)
    same = f"{name}={RUNS_ANYWHERE[name]}"
    return f"auto took for some of these runs {some}: their times differ by that too, and {same} is the same for all"
