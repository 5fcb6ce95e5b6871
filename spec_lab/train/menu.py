"""The menu of `python -m spec_lab.train`: the groups of `conf/train`, and every key of its schema.

It does not import torch, so that help and typo checks are instant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from spec_lab.menu.bounds import default_of
from spec_lab.program.options import Key, Menu, choices_of, conf_folder, groups_in
from spec_lab.train.config import TrainConfig
from spec_lab.train.options import SCHEMAS


def train_folder() -> Path:
    """Return the folder `conf/train`."""
    return conf_folder() / "train"


@cache
def train_menu() -> Menu:
    """Return the groups, and all keys by their dotted names; keys of a group have the default of each option."""
    explanations = {field.name: field.metadata["help"] for field in dataclasses.fields(TrainConfig)}
    explanations["debug"] = "cheap settings to see that it runs"
    groups = groups_in(train_folder(), explanations, SCHEMAS)
    leaves: dict[str, dict[str, Leaf]] = {}
    for group in groups.values():
        for option in group.options.values():
            for leaf in _leaves(option.schema, f"{group.name}.", option.values) if option.schema else ():
                leaves.setdefault(leaf.name, {})[option.name] = leaf
    for leaf in _leaves(TrainConfig, "", {}):
        if leaf.name not in groups:
            leaves[leaf.name] = {"": leaf}
    return Menu(groups, {name: _key(name, by_option) for name, by_option in leaves.items()})


class Leaf(NamedTuple):
    """A key with a value, in one option: its dotted name, its field in the schema, and its default."""

    name: str
    schema: type
    field: dataclasses.Field[Any]
    default: Any


def _leaves(schema: type, prefix: str, values: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield all keys below `schema`, with defaults overridden by `values`, except an option's `name`."""
    for field in dataclasses.fields(schema):
        default = default_of(field)
        if dataclasses.is_dataclass(default):
            yield from _leaves(type(default), f"{prefix}{field.name}.", values.get(field.name, {}))
        elif field.name != "name":
            yield Leaf(prefix + field.name, schema, field, values.get(field.name, default))


def _key(name: str, by_option: Mapping[str, Leaf]) -> Key:
    field = next(iter(by_option.values())).field
    schemas = tuple(dict.fromkeys(leaf.schema for leaf in by_option.values()))
    type_name = str(field.type).replace(" | None", " or null")
    defaults = {option: leaf.default for option, leaf in by_option.items()}
    choices = choices_of(get_type_hints(schemas[0])[field.name])
    return Key(name, field.metadata["help"], type_name, schemas, defaults, choices)
