"""Refuses typos before Hydra sees them.

Hydra answers `batchsize=3` with the advice to type `+batchsize=3`, which it then accepts and nobody reads. So a key or
an option that does not exist is refused here, with the nearest name, whatever sign stands before it. Hydra's own flags
and keys (`--cfg`, `hydra.mode=...`, `hydra/launcher=...`) are left to Hydra.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spec_lab.cli.options import Group, Key, read_groups, read_keys

DRY_RUN_FLAG = "--dry-run"
FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", DRY_RUN_FLAG),
)
FLAGS_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
)
FLAGS_WITH_OPTIONAL_VALUE = ("--info", "-i")
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS_THAT_ADD_OPTIONS = ("--config-path", "-cp", "--config-dir", "-cd")


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments for Hydra, `--dry-run` spelled as the override it stands for.

    Raises:
        ValueError: an argument names something that does not exist, or gives a key a value of another type.
    """
    flags, overrides = _split(arguments)
    may_add_options = any(flag in FLAGS_THAT_ADD_OPTIONS for flag in flags)
    check_overrides(overrides, may_add_options)
    return ["dry_run=true" if argument == DRY_RUN_FLAG else argument for argument in arguments]


def check_overrides(overrides: Iterable[str], may_add_options: bool = False) -> None:
    """Check `KEY=VALUE` texts.

    Args:
        overrides: as typed; sweeps are checked value by value.
        may_add_options: whether there is another folder with options, which Hydra then has to judge.
    """
    parser = OverridesParser.create()
    parsed = [_parse(parser, text) for text in overrides]
    may_add_options = may_add_options or any(override.key_or_group == "hydra.searchpath" for override in parsed)
    for override in parsed:
        name = override.key_or_group
        if name.split(".")[0].split("/")[0] == "hydra":
            continue
        if name in read_groups():
            _check_sign(override)
            _check_option(override, read_groups()[name], may_add_options)
        elif name in read_keys():
            _check_sign(override)
            _check_value(override, read_keys()[name])
        else:
            raise ValueError(f"{override.input_line}: {_explain_unknown(name)}")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name most like `word`: one that ends in it (`limit` for workload.limit), else a spelling close to it."""
    names = list(names)
    for name in names:
        if name.rpartition(".")[2] == word:
            return name
    close = get_close_matches(word, names, n=1)
    if close:
        return close[0]
    leaves = {name.rpartition(".")[2]: name for name in names}
    close = get_close_matches(word, leaves, n=1)
    return leaves[close[0]] if close else None


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags, and what is left when the values of the flags are gone too: the overrides."""
    flags, overrides = [], []
    pending: Iterator[str] = iter(arguments)
    while (argument := next(pending, None)) is not None:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flag, has_value, _ = argument.partition("=")
        flags.append(flag)
        if flag in FLAGS_WITH_VALUE:
            if not has_value:
                next(pending, None)
        elif flag in FLAGS_WITH_OPTIONAL_VALUE:
            following = next(pending, None)
            if following is not None and following not in INFO_TOPICS:
                pending = chain([following], pending)
        elif flag not in FLAGS:
            hint = _hint(nearest(flag, [*FLAGS, *FLAGS_WITH_VALUE, *FLAGS_WITH_OPTIONAL_VALUE]))
            raise ValueError(f"{flag}: there is no such flag{hint}")
    return flags, overrides


def _parse(parser: OverridesParser, text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        owners = [f"{group.name}={text}" for group in read_groups().values() if text in group.options]
        hint = _hint(" or ".join(owners) or nearest(text, [*read_groups(), *read_keys()]))
        raise ValueError(f"{text}: not of the form KEY=VALUE{hint}")
    try:
        return parser.parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{text}: not of the form KEY=VALUE ({reason}); quote special characters") from error


def _check_sign(override: Override) -> None:
    name, text = override.key_or_group, str(override.input_line)
    if override.package is not None:
        raise ValueError(f"{text}: {name} has one place; write {name}=... without {override.package}")
    if override.is_delete():
        remedy = f"choose another option with {name}=..." if name in read_groups() else f"set {name}=..."
        raise ValueError(f"{text}: nothing can be deleted; {remedy}")
    if override.is_add() or override.is_force_add():
        raise ValueError(f"{text}: {name} exists, nothing is added; write {text.lstrip('+')}")


def _check_option(override: Override, group: Group, may_add_options: bool) -> None:
    for option in _values(override):
        if not isinstance(option, str):
            raise ValueError(f"{override.input_line}: {group.name} takes one of {', '.join(group.options)}")
        if option not in group.options and not may_add_options:
            near = nearest(option, group.options)
            hint = _hint(near) if near else f"; it takes one of {', '.join(group.options)}"
            raise ValueError(f"{override.input_line}: {group.name} has no option {option}{hint}")


def _check_value(override: Override, key: Key) -> None:
    for value in _values(override):
        if not any(_accepts(schema, key.name.rpartition(".")[2], value) for schema in key.schemas):
            raise ValueError(f"{override.input_line}: {key.name} takes {_in_words(key.type_name)}, not {value!r}")


def _accepts(schema: type, field: str, value: Any) -> bool:
    try:
        OmegaConf.update(OmegaConf.structured(schema), field, value)
    except OmegaConfBaseException:
        return False
    return True


def _values(override: Override) -> Iterator[Any]:
    """The value, or those of a sweep; none for a glob or an interval, which Hydra and its sweeper expand."""
    if not override.is_sweep_override():
        yield override.value()
    elif override.is_discrete_sweep() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP:
        yield from override.sweep_iterator()


def _explain_unknown(name: str) -> str:
    parent, _, leaf = name.rpartition(".")
    if leaf == "name" and parent in read_groups():
        return f"{name} comes with the option; write {parent}=..."
    below = [key for key in read_keys() if key.startswith(f"{name}.")]
    if below:
        return f"{name} is no key, but a set of keys: {', '.join(below)}"
    return f"there is no key {name}{_hint(nearest(name, [*read_groups(), *read_keys()]))}"


def _hint(near: str | None) -> str:
    return f"; did you mean {near}?" if near else "; see --help"


def _in_words(type_name: str) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    bare = type_name.removesuffix(" or null")
    suffix = " or null" if bare != type_name else ""
    return words.get(bare, "a list like [a,b]") + suffix
