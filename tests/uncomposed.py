"""Runs without Hydra: options and values are set on the typed defaults, which takes a hundredth of the time.

That each option composes to its schema and values is asked in `test_config.py`. What cannot be set so is composed.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import open_dict

from spec_lab.menu.auto import with_auto_chosen
from spec_lab.menu.chosen import with_depth_as_k
from spec_lab.menu.config import RunConfig
from spec_lab.menu.offers import with_largest_k
from spec_lab.program.compose import compose_run, compose_with_hydra, to_typed
from spec_lab.program.options import read_groups, run_menu

PLAIN = re.compile(r"[-\w./]+|\[[-\w.,\[\]]*\]")
"""A text that YAML reads as Hydra does."""
NOT_TAKEN = object()


@functools.cache
def hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def run_of(overrides: Sequence[str]) -> RunConfig:
    """What `overrides` compose to, or the error of composing them."""
    config = copy.deepcopy(defaults())
    words = [override.partition("=")[::2] for override in overrides]
    chooses = [key in read_groups() for key, _ in words]
    words = [word for _, word in sorted(zip(chooses, words, strict=True), key=lambda pair: not pair[0])]
    if all(choose_option(config, key, text) or put(config, key, text) for key, text in words):
        return with_auto_chosen(with_largest_k(with_depth_as_k(config)))
    return compose_run(overrides)[0]


@functools.cache
def defaults() -> RunConfig:
    """A run in which each auto still stands for an option."""
    composed = compose_with_hydra([])
    with open_dict(composed):
        del composed["hydra"]
    typed = to_typed(composed, run_menu())
    assert isinstance(typed, RunConfig)
    return typed


def choose_option(config: RunConfig, group: str, option: str) -> bool:
    """Set a group to an option; return whether it has that one, which has a schema."""
    source = read_groups()[group].options.get(option) if group in read_groups() else None
    if source is None or source.schema is None:
        return False
    part = source.schema()
    setattr(config, group, part)
    return all(set_field(part, name, value) for name, value in source.values.items())


def put(config: RunConfig, knob: str, text: str) -> bool:
    """Set a knob to what is typed; return whether it takes that."""
    key = run_menu().keys.get(knob)
    if key is None or (key.choices and text not in key.choices) or not PLAIN.fullmatch(text):
        return False
    *parts, name = knob.split(".")
    return set_field(functools.reduce(getattr, parts, config), name, yaml.safe_load(text))


def set_field(part: Any, name: str, value: Any) -> bool:
    schema: Any = type(part)
    kind = hints_of(schema).get(name)
    taken = as_taken(kind, value)
    if kind is not None and taken is not NOT_TAKEN:
        setattr(part, name, taken)
    return kind is not None and taken is not NOT_TAKEN


def as_taken(kind: Any, value: Any) -> Any:
    """A value as a field of some type holds it."""
    if get_origin(kind) is list:
        entries = [as_taken(get_args(kind)[0], entry) for entry in value] if isinstance(value, list) else [NOT_TAKEN]
        return NOT_TAKEN if any(entry is NOT_TAKEN for entry in entries) else entries
    if get_args(kind):
        return next((taken for one in get_args(kind) if (taken := as_taken(one, value)) is not NOT_TAKEN), NOT_TAKEN)
    if kind is float and type(value) in (int, float):
        return float(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value) if value in list(kind) else NOT_TAKEN
    return value if kind in (int, bool, str, NoneType) and type(value) is kind else NOT_TAKEN
