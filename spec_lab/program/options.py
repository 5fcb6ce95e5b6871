"""Everything that can be chosen: the groups of `conf/` with their options, and every key of the schema.

It is read from the files without Hydra and torch, so that help and typo checks are instant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from spec_lab.core.errors import UserError
from spec_lab.core.regular import regular_text
from spec_lab.menu import registry
from spec_lab.menu.bounds import Bounds, bounds_of, default_of
from spec_lab.menu.choices import Choice
from spec_lab.menu.config import CacheConfig, RecordConfig, RecurrentConfig, RunConfig, VerifyConfig
from spec_lab.menu.option import CatchupPruningOption, CheckerOption, PromptPruningOption
from spec_lab.menu.registry import KNOBS, Registry
from spec_lab.program.yaml_file import read_yaml


@dataclass(frozen=True, slots=True)
class OptionFile:
    """One YAML file of a group. `schema` is None for one that only sets other keys, such as an experiment."""

    name: str
    command: str
    description: str
    schema: type | None
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """A folder of `conf/`. `default` is None if nothing is chosen by default."""

    name: str
    explanation: str
    default: str | None
    options: dict[str, OptionFile]


@dataclass(frozen=True, slots=True)
class Key:
    """A key that can be set, in dotted form.

    Attributes:
        schemas: the dataclasses that have it; several for a group with different options.
        choices: the words it takes, each with its meaning or an empty text; empty for a key without such a list.
        defaults: its value by option, or under the empty name for a key that belongs to no group.
    """

    name: str
    explanation: str
    type_name: str
    schemas: tuple[type, ...]
    defaults: dict[str, Any]
    choices: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def bounds(self) -> Bounds:
        """Return the bounds of its numbers, from the first schema that has it."""
        return bounds_of(_field(self.schemas[0], self.name.rpartition(".")[2]))


@dataclass(frozen=True, slots=True)
class Menu:
    """Everything that can be chosen, by name, on the command line of a run, or of a program with its own config
    folder."""

    groups: dict[str, Group]
    keys: dict[str, Key]


def conf_folder() -> Path:
    """Return `conf/`: inside an installed package, or next to the package in a checkout.

    It is not found by importing spec_lab.conf, since with two installs that import could find the other install's
    folder.

    Raises:
        UserError: there is neither.
    """
    package = Path(__file__).parents[1]
    folders = [package / "conf", package.parent / "conf"]
    found = next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
    if found is None:
        raise UserError(
            f"{folders[1] / 'config.yaml'} is missing or cannot be read; install the lab again, or bring back conf/"
        )
    return found


def run_menu(extensions: tuple[str, ...] = ()) -> Menu:
    """Read the choices of `python -m spec_lab`, including the options of `extensions`."""
    return Menu(read_groups(extensions), read_keys(extensions))


@cache
def read_groups(extensions: tuple[str, ...] = ()) -> dict[str, Group]:
    """Read the groups in the order of conf/config.yaml's defaults list."""
    registered = registry.load(extensions)
    explanations = {field.name: field.metadata["help"] for field in dataclasses.fields(RunConfig)}
    explanations |= {
        "experiment": "a ready-made study: sets other keys, often a sweep",
        "size": "how large an experiment that comes in sizes is",
        "debug": "cheap settings to try things out",
    }
    added = [extension.conf for extension in registered.extensions if extension.conf is not None]
    return groups_in(conf_folder(), explanations, registered.schemas(), added)


def groups_in(
    conf: Path, explanations: Mapping[str, str], schemas: Mapping[str, type], added: Sequence[Path] = ()
) -> dict[str, Group]:
    """Read the groups of the Hydra folder `conf`, in the order of its config.yaml's defaults list.

    Args:
        schemas: those that a YAML file may name in its defaults list.
        added: folders like `conf` with more options for the same groups.
    """
    groups = {}
    for name, default in _chosen_by_default(conf).items():
        own = sorted((conf / name).glob("*.yaml"), key=lambda file: (file.stem != default, file.stem))
        files = [*own, *(file for folder in added for file in sorted((folder / name).glob("*.yaml")))]
        options = {file.stem: read_option(file, schemas) for file in files}
        groups[name] = Group(name, explanations[name], default, options)
    return groups


def read_option(file: Path, schemas: Mapping[str, type]) -> OptionFile:
    """Read an option from its YAML file, which begins with a comment: the command that uses it, then a description.

    Raises:
        UserError: the file is not YAML with keys, lacks the two lines, or names a schema that does not exist.
    """
    values = {} if (read := read_yaml(file)) is None else read
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{file} must have keys with values, as the files in conf/ have")
    defaults = values.pop("defaults", [])
    if not isinstance(defaults, list):
        raise UserError(f"{file}: defaults must be a list, as in the files in conf/")
    text = regular_text(file)
    comments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    comments = [line for line in comments if not line.startswith("@package")]
    if len(comments) < 2:
        raise UserError(f"{file} must begin with two comment lines: the command that uses it, and its description")
    return OptionFile(file.stem, comments[0], comments[1], _schema_of(file, defaults, schemas), values)


@cache
def read_keys(extensions: tuple[str, ...] = ()) -> dict[str, Key]:
    """Read every key of a run by its dotted name, except `GROUP.name`, which the option sets."""
    groups = read_groups(extensions)
    keys: dict[str, Key] = {}
    for group in groups.values():
        keys |= {key.name: key for key in _keys_of_group(group)}
    parts = {"verify": VerifyConfig, "recurrent": RecurrentConfig, "cache": CacheConfig, "record": RecordConfig}
    for prefix, schema in (("", RunConfig), *((f"{name}.", schema) for name, schema in parts.items())):
        keys |= keys_of(schema, prefix, without=(*groups, *parts))
    return keys | _pruning_keys(keys, registry.load(extensions))


def keys_of(schema: Any, prefix: str = "", without: Sequence[str] = ()) -> dict[str, Key]:
    """Return the keys of a schema, except those in `without`, by their dotted names after `prefix`."""
    fields = [field for field in dataclasses.fields(schema) if field.name not in without]
    return {
        prefix + field.name: _key(prefix + field.name, field, (schema,), {"": default_of(field)}) for field in fields
    }


def _pruning_keys(keys: Mapping[str, Key], registered: Registry) -> dict[str, Key]:
    """List the knobs whose values are names of options. Extensions can add such options."""
    return {
        KNOBS[kind]: dataclasses.replace(keys[KNOBS[kind]], choices=dict.fromkeys(registered.options(kind), ""))
        for kind in (PromptPruningOption, CatchupPruningOption, CheckerOption)
    }


def _keys_of_group(group: Group) -> list[Key]:
    owners: dict[str, dict[str, OptionFile]] = {}
    for option in group.options.values():
        for field in dataclasses.fields(option.schema) if option.schema else ():
            if field.name != "name":
                owners.setdefault(field.name, {})[option.name] = option
    keys = []
    for name, options in owners.items():
        schemas = tuple(dict.fromkeys(option.schema for option in options.values() if option.schema))
        fields = [_field(schema, name) for schema in schemas]
        defaults = {
            option.name: option.values.get(name, default_of(_field(option.schema, name)))
            for option in options.values()
            if option.schema
        }
        explained = next((field for field in fields if "help" in field.metadata), None)
        if explained is None:
            raise UserError(
                f"{group.name}.{name}: no class says what it is; in class {schemas[0].__name__} write "
                f'{name}: TYPE = knob(DEFAULT, "what it is")'
            )
        keys.append(_key(f"{group.name}.{name}", explained, schemas, defaults))
    return keys


def _key(name: str, field: dataclasses.Field[Any], schemas: tuple[type, ...], defaults: dict[str, Any]) -> Key:
    hint = get_type_hints(schemas[0])[field.name]
    type_name = str(field.type).replace(" | None", " or null")
    return Key(name, field.metadata["help"], type_name, schemas, defaults, choices_of(hint))


def choices_of(hint: Any) -> dict[str, str]:
    """Return the members of a `Choice` with their meanings; empty for any other type. It looks inside lists and
    unions."""
    if isinstance(hint, type) and issubclass(hint, Choice):
        return {member.value: member.help for member in hint}
    return next((found for inner in get_args(hint) if (found := choices_of(inner))), {})


def _field(schema: type, name: str) -> dataclasses.Field[Any]:
    return next(field for field in dataclasses.fields(schema) if field.name == name)


def _chosen_by_default(conf: Path) -> dict[str, str | None]:
    """Return the groups of the defaults list with their options. Entries without an option are left out, such as
    `_self_`, and those that begin with `override` or `optional`."""
    entries = read_yaml(conf / "config.yaml")["defaults"]
    chosen = {}
    for entry in entries:
        if isinstance(entry, dict):
            [(name, option)] = entry.items()
            if not name.startswith(("override ", "optional ")):
                chosen[name] = option
    return chosen


def _schema_of(file: Path, defaults: list[Any], schemas: Mapping[str, type]) -> type | None:
    prefix = "/schema/"
    for entry in defaults:
        if isinstance(entry, str) and entry.startswith(prefix):
            name = entry.removeprefix(prefix).partition("@")[0]
            if name not in schemas:
                raise UserError(f"{file} names the schema {name}; there are {', '.join(schemas)}")
            return schemas[name]
    return None
