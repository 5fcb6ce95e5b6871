"""Old names, for one release. Under them, loaders of drafters, rules and graphs get the configuration, and not the
`Chosen` run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from spec_lab.menu import option
from spec_lab.menu.option import (
    AttentionOption,
    CatchupPruningOption,
    LoggerOption,
    PromptPruningOption,
    Refusal,
    TargetOption,
    TreeOption,
    WorkloadOption,
)

__all__ = ["AttentionOption", "CatchupPruningOption", "DrafterOption", "GraphOption", "LoggerOption"]
__all__ += ["PromptPruningOption", "Refusal", "RuleOption", "TargetOption", "TreeOption", "WorkloadOption"]


def _taking(row: type[option.Option], loaders: tuple[str, ...], old: Callable[[Any], tuple[Any, ...]]) -> Any:
    """Return a function that makes an option (a `row`) from loaders of the old form. `old` returns the further
    arguments that such a loader takes after its part of the configuration."""

    def of_config(load: Any) -> Any:
        return load and (lambda chosen, options, build: load(chosen.config, options, *old(build)))

    @wraps(row)
    def make(**fields: Any) -> option.Option:
        return row(**{name: of_config(value) if name in loaders else value for name, value in fields.items()})

    return make


DrafterOption = _taking(option.DrafterOption, ("load", "load_tree", "aspects"), lambda build: (build,))
RuleOption = _taking(
    option.RuleOption,
    ("build", "walk"),
    lambda build: (SimpleNamespace(models=build, limits=build, seeds=build.seeds),),
)
GraphOption = _taking(option.GraphOption, ("build",), lambda build: (build, build))
