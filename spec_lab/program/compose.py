"""Makes a `RunConfig` from overrides."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from spec_lab.core.errors import UserError
from spec_lab.menu import registry
from spec_lab.menu.auto import with_auto_chosen
from spec_lab.menu.chosen import with_depth_as_k
from spec_lab.menu.config import RunConfig
from spec_lab.menu.offers import with_largest_k
from spec_lab.menu.registry import Registry
from spec_lab.program.explain import explain, first_line, not_read, read_too_late
from spec_lab.program.labels import name_groups
from spec_lab.program.options import Menu, conf_folder, read_groups, run_menu
from spec_lab.program.override_text import parse_override
from spec_lab.program.overrides import check_overrides, explain_unknown, extensions_in, in_words, value_of
from spec_lab.program.unsafe import refuse_argument

VERSION_BASE = "1.3"
SEARCH_PATH = "hydra.searchpath="
ONE_AT_A_TIME = threading.Lock()
"""Hydra keeps global state for the process while composing, so only one thread may compose at a time."""


def compose_run(overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[str, str]]:
    """Return what `python -m spec_lab OVERRIDES...` would run, and the name of each group's choice (`labels.py`).

    For tests, notebooks and other programs. The sweep of an experiment is not expanded.

    Raises:
        UserError: an override is mistyped, does not fit the options chosen, or has several values.
    """
    config, options = to_config_and_options(compose_with_hydra(overrides))
    return config, name_options(config, options)


def to_config_and_options(composed: DictConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the typed form of a result of `compose_with_hydra`, and the option chosen in each group."""
    options = chosen_options(composed.hydra.runtime.choices)
    with open_dict(composed):
        del composed["hydra"]
    return to_run_config(composed), options


def name_options(config: RunConfig, options: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each group's choice in a run, given the option chosen in each."""
    return name_groups(config, options, read_groups(tuple(config.extensions)))


def compose_with_hydra(overrides: Sequence[str]) -> DictConfig:
    """Compose as `compose_run` does, without converting to types; Hydra's part of the result says whether it is a
    sweep."""
    if isinstance(overrides, str) or not isinstance(overrides, Sequence) or not all(map(_is_text, overrides)):
        raise UserError(f"compose takes a list of texts, not {overrides!r}; use one such as ['drafter=ngram']")
    for override in overrides:
        refuse_argument(override)
    extensions = extensions_in(overrides)
    check_overrides(overrides, menu=run_menu(extensions))
    _refuse_several(overrides, extensions)
    registered = registry.load(extensions)
    register_schemas(registered)
    try:
        folder, arguments = str(conf_folder().absolute()), with_search_path(overrides, registered)
        with _alone_with_hydra(), initialize_config_dir(folder, version_base=VERSION_BASE, job_name="spec_lab"):
            composed = compose("config", overrides=arguments, return_hydra_config=True)
        refuse_unread_extensions(composed.extensions, registered)
        return composed
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


def _refuse_several(overrides: Sequence[str], extensions: tuple[str, ...]) -> None:
    """Refuse several values of a key, for which Hydra would suggest a flag that does not exist here."""
    parser, menu = OverridesParser.create(), run_menu(extensions)
    for text in overrides:
        if parse_override(parser, text, menu).is_sweep_override():
            raise UserError(f"{text} gives several values, but this is one run; give one of them")


def _is_text(override: object) -> bool:
    return isinstance(override, str)


def refuse_unread_extensions(names: Sequence[str], registered: Registry) -> None:
    """Raise UserError if a file names an extension that was not loaded when the run was composed.

    Args:
        names: the composed value of `extensions`.
        registered: the registry that it was composed with.
    """
    there = {extension.name for extension in registered.extensions}
    if not there.issuperset(names):
        raise UserError(read_too_late(names))


@contextmanager
def _alone_with_hydra() -> Iterator[None]:
    """Set aside Hydra's global state, which exists once in a process, if a calling program has initialised it."""
    with ONE_AT_A_TIME:
        callers = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().hydra = callers


def register_schemas(registered: Registry) -> None:
    """Make every schema of a run known to Hydra."""
    store_schemas(registered.schemas())


def store_schemas(schemas: Mapping[str, type]) -> None:
    """Make `schemas` known to Hydra as `/schema/NAME`, a separate group, so that they do not appear as options."""
    store = ConfigStore.instance()
    for path, schema in schemas.items():
        group, _, name = f"schema/{path}".rpartition("/")
        if _stored_schema(store, group, name) is not schema:  # making a node is slow compared with composing
            store.store(group=group, name=name, node=schema)


def _stored_schema(store: ConfigStore, group: str, name: str) -> type | None:
    """Return the schema that Hydra already has under a name; None if there is none."""
    folder: Any = store.repo
    for part in group.split("/"):
        folder = folder.get(part, {})
    node = folder.get(f"{name}.yaml")
    return None if node is None else OmegaConf.get_type(node.node)


def with_search_path(arguments: Sequence[str], registered: Registry) -> list[str]:
    """Return `arguments` with the `conf/` of extensions on Hydra's search path, after the user's own entries.

    They are merged into one override, since Hydra reads only one.
    """
    typed = {text: value_of(text) for text in arguments if text.startswith(SEARCH_PATH)}
    folders = [extension.conf.as_uri() for extension in registered.extensions if extension.conf is not None]
    if not folders or not all(isinstance(value, list) for value in typed.values()):
        return list(arguments)
    together = [str(folder) for value in typed.values() for folder in value] + folders
    return [*(text for text in arguments if text not in typed), f"{SEARCH_PATH}[{','.join(map(repr, together))}]"]


def to_run_config(composed: DictConfig) -> RunConfig:
    """Return the typed form of a composed run, with K set from a tree's depth or a schedule's largest K, and each
    `auto` replaced by the chosen option.

    Raises:
        UserError: see `to_typed` and `with_auto_chosen`; or an option of the user's has another option's name, but not
            its keys.
    """
    config = to_typed(composed, run_menu())
    assert isinstance(config, RunConfig)
    for group, schema in _renamed(config):
        part = getattr(config, group)
        lacking = [field.name for field in dataclasses.fields(schema) if not hasattr(part, field.name)]
        if lacking:
            raise UserError(
                f"{group}: an option of your own has `name: {part.name}` without {', '.join(lacking)}, which {group}="
                f"{part.name} has; begin its file with `defaults: [{part.name}, _self_]`, and leave out its name"
            )
    return with_auto_chosen(with_largest_k(with_depth_as_k(config)))


def to_typed(composed: DictConfig, menu: Menu) -> Any:
    """Return a composed configuration as an instance of its dataclass.

    Raises:
        UserError: an added key is not read by anything, a key has no value, or an interpolation is invalid.
    """
    try:
        unknown = sorted(_unknown_keys(composed))
        missing = sorted(OmegaConf.missing_keys(composed))
        if unknown:
            raise UserError(not_read(unknown[0], menu))
        if missing:
            group = missing[0].removesuffix(".name")
            said = f"write `name: OPTION` in the file of the option that {group}= chooses"
            raise UserError(f"{missing[0]} has no value; {said if group in menu.groups else f'set {missing[0]}=...'}")
        resolved = composed.copy()
        OmegaConf.resolve(resolved)  # checks the types of interpolated values, which to_object does not
        return OmegaConf.to_object(resolved)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, menu)) from error


def retyped(config: RunConfig) -> RunConfig:
    """Check the types of a run that a program may have changed since it was composed, and return it with correct types.

    Raises:
        UserError: a key has a value of another type, there is no such key, or a part has another option's name.
    """
    menu = run_menu()
    parts = {f"{field.name}.": getattr(config, field.name) for field in dataclasses.fields(config)}
    parts = {"": config} | {prefix: part for prefix, part in parts.items() if _is_instance(part)}
    for prefix, part in parts.items():
        _refuse_new_attributes(part, prefix, menu)
        _make_plain(part)
    try:
        typed: Any = OmegaConf.to_object(OmegaConf.structured(config))
    except OmegaConfBaseException:
        for prefix, part in reversed(parts.items()):  # an error in the whole would not name the part
            _refuse_wrong_types(part, prefix, menu)
        raise
    assert isinstance(typed, RunConfig)
    for group, _ in _renamed(typed):
        name = getattr(typed, group).name
        raise UserError(
            f"config.{group}.name={name!r} is an option that has its own keys; use spec_lab.compose(['{group}={name}'])"
        )
    return typed


def _is_instance(part: Any) -> bool:
    return dataclasses.is_dataclass(part) and not isinstance(part, type)


def _refuse_wrong_types(part: Any, prefix: str, menu: Menu) -> None:
    try:
        OmegaConf.to_object(OmegaConf.structured(part))
    except OmegaConfBaseException as error:
        raise UserError(_wrong_type(f"{prefix}{error.full_key or ''}".rstrip("."), error, menu)) from error


def _renamed(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the group of each part that has the name of an option with another schema, and that schema."""
    schemas = registry.load(config.extensions).schemas()
    for group in (field.name for field in dataclasses.fields(config)):
        part = getattr(config, group)
        name = getattr(part, "name", None)
        schema = schemas.get(f"{group}/{name}", type(part))
        if schema is not type(part):
            yield group, schema


def _make_plain(part: Any) -> None:
    """Replace single numbers of numpy or torch by Python's, which have the same value."""
    for name, value in vars(part).items():
        if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
            setattr(part, name, value.item())


def _refuse_new_attributes(part: Any, prefix: str, menu: Menu) -> None:
    """Refuse additional attributes, which Python allows but nothing would read."""
    for name in sorted(vars(part).keys() - {field.name for field in dataclasses.fields(part)}):
        key = f"{prefix}{name}"
        if "." in name and key in menu.keys:
            raise UserError(f"config: nothing reads an attribute {name!r}; write composed.config.{key} = VALUE")
        raise UserError(f"config.{key}: {not_read(key, menu) if key in menu.keys else explain_unknown(key, menu)}")


def _wrong_type(place: str, error: OmegaConfBaseException, menu: Menu) -> str:
    """Return the error for a value of the wrong type, which says what the key takes; `place` may be an entry of a
    list."""
    knob = place.partition("[")[0]
    if knob in menu.keys:
        key = menu.keys[knob]
        return f"config.{knob} takes {', '.join(key.choices) or in_words(key)} ({first_line(error)})"
    if knob in menu.groups:
        return f"config.{knob} takes the composed option; use spec_lab.compose(['{knob}=...']).config.{knob}"
    return f"config.{place}: {first_line(error)}"


def chosen_options(hydra_choices: Mapping[str, str | None]) -> dict[str, str]:
    """Return the option of each group in the order of conf/config.yaml, without Hydra's groups and unchosen ones.

    The group of sizes is also left out if there is no experiment.
    """
    chosen = {group: option for group in read_groups() if (option := hydra_choices.get(group)) is not None}
    if "experiment" not in chosen:
        chosen.pop("size", None)
    return chosen


def _unknown_keys(node: DictConfig, prefix: str = "") -> list[str]:
    """List keys that were added to a typed node, which OmegaConf would drop silently."""
    schema = OmegaConf.get_type(node)
    declared = {field.name for field in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else set()
    unknown = []
    for key in map(str, node):
        name = prefix + key
        if key not in declared:
            unknown.append(name)
        elif not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            child: Any = node[key]
            if isinstance(child, DictConfig):
                unknown += _unknown_keys(child, f"{name}.")
    return unknown
