"""Refuses typos before Hydra sees them.

On `batchsize=3` Hydra advises to type `+batchsize=3`, which it then accepts although nothing reads the key. So a key or
an option that does not exist is refused here, with or without a `+`, and the nearest name is suggested. Hydra's own
keys (`hydra.mode=...`, `hydra/launcher=...`), except `SWEPT_TOGETHER`, are left to Hydra.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spec_lab.core.errors import UserError
from spec_lab.menu.nearest import hint, nearest, one_of
from spec_lab.menu.registry import KNOBS
from spec_lab.program.flags import DRY_RUN_FLAG, FLAGS_THAT_ADD_OPTIONS, split_flags
from spec_lab.program.options import Group, Key, Menu, conf_folder, run_menu
from spec_lab.program.override_text import parse_override
from spec_lab.program.points import with_points

LIST_OF_LISTS = "list[list["
MOST_JOBS = 10_000
"""A multirun of more jobs is refused. It is most likely a mistake, such as a range with too many zeros."""
SEVERAL = "; several values, each a run of its own, are written 1,2"
OF_THE_SWEEP = ("output_dir", "dry_run", "fresh", "leave_out", "extensions")
"""Keys that a sweep reads once for all its jobs."""
SWEPT_TOGETHER = "hydra.sweeper.max_batch_size"
EXTENDED = frozenset([*KNOBS.values(), *(knob.partition(".")[0] for knob in KNOBS.values())])
"""The groups to which extensions can add options, and the knobs whose values are such options."""


def check_arguments(arguments: Sequence[str], menu: Menu | None = None) -> list[str]:
    """Return the arguments in the form that Hydra reads: flags first, and `--dry-run` as an override.

    `menu` has the possible choices; None means those of a run.

    Raises:
        UserError: an argument names something that does not exist, or has a form or a value that is refused.
    """
    menu = menu or run_menu()
    flags, overrides = split_flags(arguments)
    if DRY_RUN_FLAG in flags and "dry_run" not in menu.keys:
        raise UserError(f"{DRY_RUN_FLAG}: this program has no dry run; --cfg job prints the configuration")
    of_hydra = with_points(overrides) if "experiment" in menu.groups else overrides
    check_overrides([text for text in of_hydra if text in overrides], _may_add_options(flags), menu)
    dry_run = ["dry_run=true"] if DRY_RUN_FLAG in flags else []
    return [*(flag for flag in flags if flag != DRY_RUN_FLAG), *of_hydra, *dry_run]


def _may_add_options(flags: Iterable[str]) -> bool:
    return any(flag in FLAGS_THAT_ADD_OPTIONS for flag in flags)


def check_overrides(overrides: Iterable[str], may_add_options: bool = False, menu: Menu | None = None) -> None:
    """Check `KEY=VALUE` texts.

    Args:
        overrides: the overrides as typed; each listed value of a sweep is checked.
        may_add_options: whether another folder may have options too; unknown ones are then left to Hydra.
        menu: the possible choices; None means those of a run.
    """
    menu = menu or run_menu()
    parser = OverridesParser.create()
    parsed = [parse_override(parser, text, menu) for text in overrides]
    refuse_many_jobs(parsed)
    may_add_options = may_add_options or any(override.key_or_group == "hydra.searchpath" for override in parsed)
    for override in parsed:
        name = override.key_or_group
        if name == SWEPT_TOGETHER and not (override.value() is None or override.value() in range(1, MOST_JOBS)):
            raise UserError(f"{override.input_line}: must be at least 1; use {SWEPT_TOGETHER}=null for all jobs")
        if name.split(".")[0].split("/")[0] == "hydra":
            continue
        if name in menu.groups:
            _check_sign(override, menu)
            _check_option(override, menu, may_add_options)
            _check_experiments(override, menu)
        elif name in menu.keys:
            _check_sign(override, menu)
            _check_value(override, menu)
            if override.is_sweep_override() and name in OF_THE_SWEEP and "fresh" in menu.keys:
                raise UserError(f"{override.input_line}: {name} is read once for all jobs; give it one value")
        else:
            raise UserError(f"{override.input_line}: {explain_unknown(name, menu)}")
    _check_size(parsed)


def refuse_many_jobs(overrides: Iterable[Override]) -> None:
    """Refuse a sweep of more than `MOST_JOBS` jobs, before its values are listed."""
    swept = [override for override in overrides if override.is_sweep_override()]
    sizes = [sum(1 for _ in islice(_values(override), MOST_JOBS + 1)) for override in swept]
    if math.prod(max(size, 1) for size in sizes) > MOST_JOBS:
        typed = " ".join(str(override.input_line) for override in swept)
        raise UserError(f"{typed} has more than {MOST_JOBS} jobs; give fewer values")


def is_sweep(experiment: str, menu: Menu) -> bool:
    """Return whether an experiment is a sweep. As one of several experiments, it would run only its first cell, or
    none."""
    found = menu.groups["experiment"].options.get(experiment) if "experiment" in menu.groups else None
    return found is not None and bool(found.values.get("hydra", {}).get("mode") == "MULTIRUN")


def _check_experiments(override: Override, menu: Menu) -> None:
    """Refuse several experiments if one of them is a sweep, whose own values Hydra would drop."""
    found = next((value for value in map(str, _values(override)) if is_sweep(value, menu)), None)
    if override.key_or_group == "experiment" and override.is_sweep_override() and found is not None:
        raise UserError(f"{override.input_line}: experiment={found} is a sweep of its own; start one after the other")


def _check_size(overrides: Iterable[Override]) -> None:
    """Refuse a size unless every chosen experiment reads it, since others would silently ignore it."""
    chosen = {override.key_or_group: override for override in overrides}
    if "size" not in chosen:
        return
    sized = sorted(path.parents[1].name for path in (conf_folder() / "experiment").glob("*/grid/*.yaml"))
    experiments = set(_values(chosen["experiment"])) if "experiment" in chosen else set()
    if not experiments or not experiments <= set(sized):
        wanted = one_of("experiment", dict.fromkeys(sized))
        raise UserError(f"{chosen['size'].input_line}: only experiments that have sizes read it; add {wanted}")


def _check_sign(override: Override, menu: Menu) -> None:
    name, text = override.key_or_group, str(override.input_line)
    if override.package is not None:
        raise UserError(f"{text}: {name} has only one place; write {name}=... without {override.package}")
    if override.is_delete():
        remedy = f"choose another option with {name}=..." if name in menu.groups else f"set {name}=..."
        raise UserError(f"{text}: keys cannot be deleted; {remedy}")
    if override.is_add() or override.is_force_add():
        raise UserError(f"{text}: {name} exists already, so + adds nothing; write {text.lstrip('+')}")


def _check_option(override: Override, menu: Menu, may_add_options: bool) -> None:
    group = menu.groups[override.key_or_group]
    if override.is_sweep_override() and not may_add_options and not swept_options(override, group):
        raise UserError(f"{override.input_line} selects no job; {group.name} takes {', '.join(group.options)}")
    for option in _values(override):
        if not isinstance(option, str):
            raise UserError(f"{override.input_line}: {group.name} takes one of {', '.join(group.options)}")
        if option not in group.options and not may_add_options:
            near = nearest(option, group.options)
            suggestion = hint(near) if near else f"; it takes one of {', '.join(group.options)}"
            said = f"{override.input_line}: {group.name} has no option {option}{suggestion}"
            raise UserError(with_extensions(said, group.name, menu))


def swept_options(override: Override, group: Group) -> list[str]:
    """Return the options that a sweep of a group runs."""
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        pattern: Any = override.value()  # Hydra's annotation does not include its own Glob
        return list(pattern.filter(list(group.options)))
    return [str(option) for option in _values(override)]


def with_extensions(said: str, name: str, menu: Menu) -> str:
    """Return the refusal `said` of an option of the group or knob `name`, with a hint if an extension may have it."""
    if "extensions" not in menu.keys or name not in EXTENDED:
        return said
    file = f", and each a file conf/{name}/OPTION.yaml in its package" if name in menu.groups else ""
    return f"{said}{' An' if said.endswith('?') else '; an'} extension's options need extensions=[MODULE]{file}"


def extensions_in(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the modules in `extensions=[a,b]` among the typed arguments; empty if it is not among them.

    Raises:
        UserError: `extensions` is given twice, or is not a list of names.
    """
    typed = [text for text in arguments if text.lstrip("+").startswith("extensions=")]
    if len(typed) > 1:
        raise UserError(f"{' '.join(typed)}: extensions is given twice; name all modules in one list")
    values = [value_of(text) for text in typed]
    for text, value in zip(typed, values, strict=True):
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise UserError(f"{text}: extensions takes a list of modules; write extensions=[my_lab]")
    return tuple(name for value in values for name in value)


def value_of(text: str) -> Any:
    """Return the value of a `KEY=VALUE` text as Hydra reads it; None for a sweep or a text of another form."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return None
    return None if override.is_sweep_override() else override.value()


def _check_value(override: Override, menu: Menu) -> None:
    key = menu.keys[override.key_or_group]
    if key.choices:
        _check_choice(override, key, menu)
    for value in _values(override):
        if not any(_accepts(schema, key.name.rpartition(".")[2], value) for schema in key.schemas):
            given = "null" if value is None else repr(value)
            several = SEVERAL if isinstance(value, list) and LIST_OF_LISTS not in key.type_name else ""
            raise UserError(f"{override.input_line}: {key.name} takes {in_words(key)}, not {given}{several}")


def _check_choice(override: Override, key: Key, menu: Menu) -> None:
    for value in _values(override):
        for name in value if isinstance(value, list) else [value]:
            if str(name) not in key.choices:
                near = nearest(str(name), key.choices)
                suggestion = f"; did you mean {near}?" if near else ""
                takes, given = f"it takes {', '.join(key.choices)}", "null" if name is None else name
                said = f"{override.input_line}: {key.name} has no value {given}, {takes}{suggestion}"
                raise UserError(with_extensions(said, key.name, menu))


def _accepts(schema: type, field: str, value: Any) -> bool:
    """Return whether a field accepts `value`. Nested lists are checked here, since OmegaConf would accept a list as an
    entry of a list of numbers."""
    type_name = next(str(known.type) for known in dataclasses.fields(schema) if known.name == field)
    if isinstance(value, list):
        entries = value
        if type_name.startswith(LIST_OF_LISTS):
            if not all(isinstance(entry, list) for entry in value):
                return False
            entries = [item for entry in value for item in entry]
        if any(isinstance(entry, list | dict | bool) for entry in entries):
            return False
    try:
        OmegaConf.update(OmegaConf.structured(_alone(schema, field)), field, value)
    except OmegaConfBaseException:
        return False
    return True


@cache
def _alone(schema: type, field: str) -> type:
    """Return a schema with one field of `schema`. OmegaConf makes a node of every field, so checking against the whole
    schema would take as long as composing."""
    [known] = (known for known in dataclasses.fields(schema) if known.name == field)
    default: Any = dataclasses.field(default=known.default, default_factory=known.default_factory)
    return dataclasses.make_dataclass(schema.__name__, [(field, get_type_hints(schema)[field], default)])


def _values(override: Override) -> Iterator[Any]:
    """Yield the value, or the values of a sweep. A glob or an interval lists no values, so nothing is yielded."""
    if not override.is_sweep_override():
        yield override.value()
    elif override.is_discrete_sweep() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP:
        try:
            yield from override.sweep_iterator()
        except ValueError as error:
            raise UserError(
                f"{override.input_line}: {error}; write range(FIRST,END,STEP), or values: KEY=1,3"
            ) from error


def explain_unknown(name: str, menu: Menu) -> str:
    """Return the refusal of a key `name` that cannot be set, with a remedy or the nearest key if there is one."""
    parent, _, leaf = name.rpartition(".")
    if leaf == "name" and parent in menu.groups:
        return f"{name} is set by the option; write {parent}=..."
    below = [key for key in menu.keys if key.startswith(f"{name}.")]
    if below:
        return f"{name} is not a key, but a set of keys: {', '.join(below)}"
    near = nearest(name, [*menu.groups, *menu.keys])
    if near == parent and near in menu.groups:
        return f"there is no key {name}; {near}=OPTION chooses an option, and --help {near} lists the keys"
    return f"there is no key {name}{hint(near)}"


def in_words(key: Key) -> str:
    """Describe the values that a key of this type takes. For lists of lists the key's explanation is needed too."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    bare = key.type_name.removesuffix(" or null")
    suffix = " or null" if bare != key.type_name else ""
    if bare.startswith(LIST_OF_LISTS):
        return f"a list of lists{suffix} ({key.explanation})"
    example = "[1,2]" if "int]" in bare or "float]" in bare else "[a,b]"
    return words.get(bare, f"a list like {example}") + suffix
