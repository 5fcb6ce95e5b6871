"""The registry of options: those of `spec_lab.options`, and those of the extensions.

A registry depends only on the names of the extensions and on the installed ones. A run's rows, its registry entries,
are looked up once (`menu.chosen`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar, cast, get_type_hints

from spec_lab.core.errors import UserError
from spec_lab.menu.config import (
    AttentionConfig,
    AutoGraphConfig,
    LoggerConfig,
    PruneConfig,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    WorkloadConfig,
)
from spec_lab.menu.extensions import Extension, find_extension, find_extensions
from spec_lab.menu.option import (
    AttentionOption,
    CatchupPruningOption,
    CheckerOption,
    DrafterOption,
    GraphOption,
    LoggerOption,
    MetricOption,
    Option,
    PromptPruningOption,
    RuleOption,
    TargetOption,
    TreeOption,
    WorkloadOption,
)

if TYPE_CHECKING:
    from spec_lab.acceptance.deterministic import DraftJudge

Row = TypeVar("Row", bound=Option)
Part = TypeVar("Part")
PLAIN_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
METRIC = "metric"
"""The name used for the kind of rows that are not chosen by a knob."""
OWN = "spec_lab.options"
"""The module with this lab's own options."""

KNOBS: Mapping[type[Option], str] = {
    TargetOption: "target",
    DrafterOption: "drafter",
    RuleOption: "acceptance",
    PromptPruningOption: "prune.prefill",
    CatchupPruningOption: "prune.catchup",
    GraphOption: "graph",
    AttentionOption: "attention",
    WorkloadOption: "workload",
    CheckerOption: "workload.checker",
    LoggerOption: "logger",
    TreeOption: "tree",
}
"""The group or knob that the user sets to choose an option of each kind."""

GROUP_SCHEMAS: Mapping[str, type] = {
    "run": RunConfig,
    "target": TargetConfig,
    "prune": PruneConfig,
    "attention": AttentionConfig,
    "graph/auto": AutoGraphConfig,
    "workload": WorkloadConfig,
    "sampling": SamplingConfig,
    "logger": LoggerConfig,
}
"""Schemas by the name that YAML files use: of a whole run, of groups whose options share one, and of graph=auto."""


class Registry:
    """The rows of every option, by kind and name."""

    def __init__(self) -> None:
        self.extensions: list[Extension] = []
        self._rows: defaultdict[type[Option], dict[str, Option]] = defaultdict(dict)

    def add(self, *options: Option) -> None:
        """Add rows. An extension may call it several times.

        Raises:
            UserError: there already is an option of that kind and name, the name is not a plain word, an argument is
                not a row, or `_refuse_broken` refuses a row.
        """
        for option in options:
            if type(option) not in (*KNOBS, MetricOption):
                given: object = option
                row = next((kind.__name__ for kind in (*KNOBS, MetricOption) if kind is given), DrafterOption.__name__)
                raise UserError(
                    f"{option!r} is not a row of an option; add a row such as {row}(name=...) (docs/extend.md)"
                )
            typed_as = KNOBS.get(type(option), METRIC)
            if not PLAIN_WORD.fullmatch(option.name):
                raise UserError(
                    f"{typed_as}={option.name!r} cannot be typed, but it also names folders; use a plain word such as "
                    "my_option"
                )
            _refuse_broken(option)
            rows = self._rows[type(option)]
            if option.name in rows:
                raise UserError(f"{typed_as}={option.name} is registered twice; give one of them another name")
            rows[option.name] = option

    def options(self, kind: type[Row]) -> Mapping[str, Row]:
        """Return the rows of a kind, in the order they were added."""
        return cast("Mapping[str, Row]", self._rows[kind])

    def find(self, kind: type[Row], name: str) -> Row:
        """Return the row of an option.

        Raises:
            UserError: it is not registered.
        """
        found = self.options(kind).get(name)
        if found is None:
            _refuse_other_name(name, self.options(kind))
            in_file = "" if "." in KNOBS[kind] else " (in a file of your own: as its `name`)"
            raise UserError(
                f"{KNOBS[kind]}={name}: nothing builds it; use one of {', '.join(self.options(kind))}{in_file}, or "
                "name the module that registers it with extensions=[MODULE] (docs/extend.md)"
            )
        return found

    def judge_of(self, rule: str) -> Callable[..., DraftJudge]:
        """Return the function that makes a rule for recorded runs. Such a rule decides without drawing.

        Raises:
            UserError: the rule is not registered, or has no such function.
        """
        row = self.find(RuleOption, rule)
        judge = row.judge or row.judge_again
        if judge is None:
            others = [name for name, other in self.options(RuleOption).items() if other.judge or other.judge_again]
            raise UserError(
                f"acceptance={rule} draws or needs the parts of a run (it has build, and no judge), so it cannot be "
                f"re-scored; use one of {', '.join(others)}"
            )
        return judge

    def origins(self) -> dict[str, dict[str, str | None]]:
        """Return version and revision of every extension, for the record."""
        return {extension.name: extension.origin() for extension in self.extensions}

    def schemas(self) -> dict[str, type]:
        """Return every schema by the name that YAML files use for it, such as `drafter/eagle3`, or `workload` for a
        whole group."""
        schemas = dict(GROUP_SCHEMAS)
        for kind, group in KNOBS.items():
            for option in self.options(kind).values():
                schema = getattr(option, "schema", None)
                if schema is not None and schema is not GROUP_SCHEMAS.get(group):
                    schemas[f"{group}/{option.name}"] = schema
        return schemas


def made(part: Part | None, option: Option, function: str) -> Part:
    """Return the object that a function of a row has made.

    Raises:
        UserError: it is None, for instance since an extension's function has no return.
    """
    if part is None:
        typed = f"{KNOBS[type(option)]}={option.name}"
        raise UserError(f"{typed}: {function} of its row returned None; return what spec_lab/menu/option.py describes")
    return part


def _refuse_other_name(name: str, rows: Mapping[str, Option]) -> None:
    """Raise UserError if a row's schema has this name, which no row has: the names of row and schema must agree."""
    for row in rows.values():
        schema = getattr(row, "schema", None)
        if schema is not None and getattr(schema, "name", None) == name:
            said = f"{KNOBS[type(row)]}={row.name}: its schema has the name {name}"
            raise UserError(f'{said}; write name: str = "{row.name}" in class {schema.__name__}')


def _refuse_broken(option: Option) -> None:
    """Raise UserError if a row's schema or refusals are of the wrong kind, or if a metric lacks a function or a
    definition."""
    typed = f"{KNOBS.get(type(option), METRIC)}={option.name}"
    if hasattr(option, "schema"):
        base = get_type_hints(RunConfig)[KNOBS[type(option)]]
        schema = option.schema
        if not (isinstance(schema, type) and is_dataclass(schema) and issubclass(schema, base)):
            raise UserError(f"{typed}: its schema must be a dataclass derived from {base.__name__}, not {schema!r}")
        if "__dataclass_fields__" not in vars(schema):
            raise UserError(
                f"{typed}: the fields of its schema are not read; write @dataclass above class {schema.__name__}"
            )
    if not isinstance(option.refusals, tuple) or not all(map(callable, option.refusals)):
        raise UserError(f"{typed}: its refusals must be a tuple of functions, not {option.refusals!r}")
    if isinstance(option, MetricOption):
        if not callable(option.of_round) and not callable(option.of_run):
            raise UserError(f"{typed}: nothing computes it; give it a function, such as of_round or of_run")
        if not isinstance(option.definition, str) or not option.definition.strip():
            raise UserError(f"{typed}: its definition is empty; describe it in a sentence")


def chosen_name(config: RunConfig, kind: type[Option]) -> str:
    """Return the name of the option of a kind that a run chose."""
    knob = KNOBS[kind]
    name: str = attrgetter(knob if "." in knob else f"{knob}.name")(config)
    return name


def load(extensions: Sequence[str] = ()) -> Registry:
    """Register the options of this package, then those of installed extensions, then those of the modules named.

    Raises:
        UserError: a module cannot be imported, has no function `register`, or registers an existing or a broken row.
    """
    return _load(tuple(extensions))


@cache
def _load(extensions: tuple[str, ...]) -> Registry:
    registry = Registry()
    find_extension(OWN).register(registry)
    for extension in find_extensions(extensions):
        extension.register(registry)
        registry.extensions.append(extension)
    return registry
