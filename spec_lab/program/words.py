"""Reads `KEY=VALUE` words into a schema, for keys that belong to no group and that no config file or sweep sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from spec_lab.core.errors import UserError
from spec_lab.menu.bounds import out_of_bounds
from spec_lab.program.options import Menu, keys_of
from spec_lab.program.override_text import as_override, parse_override
from spec_lab.program.overrides import check_overrides

Schema = TypeVar("Schema")


def read_words(schema: type[Schema], words: Sequence[str]) -> Schema:
    """Return an instance of `schema` with the values in `words`. The last value of a key counts, as in Hydra.

    The value of a key that takes only text is taken literally, even if it has special characters.

    Raises:
        UserError: a word is not KEY=VALUE, names no key, has several values, or has a value of another type or out of
            bounds.
    """
    menu, texts = Menu({}, keys_of(schema)), {key.name for key in keys_of(schema).values() if key.type_name == "str"}
    typed: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        typed[name] = as_override(name, value) if sign and name in texts else word
    check_overrides(typed.values(), menu=menu)
    parser = OverridesParser.create()
    read = {name: parse_override(parser, word, menu) for name, word in typed.items()}
    for override in read.values():
        if override.is_sweep_override():
            raise UserError(f"{override.input_line} gives several values; call the program once for each")
    values = {name: override.value() for name, override in read.items()}
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    found = out_of_bounds(config)
    if found:
        raise UserError(found[0])
    return config
