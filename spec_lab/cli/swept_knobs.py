"""Handles knobs that only some of the swept options have: `-m acceptance=strict,typical acceptance.epsilon=0.1`.

Such a knob is added to every job, and removed again from jobs whose option does not have it. If that makes two jobs
of this process equal, as with two values of the knob, the second is left out. Workers of a launcher run both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from spec_lab.core.errors import UserError
from spec_lab.program.options import Menu
from spec_lab.program.overrides import swept_options

FORCE = "++"


def with_forced_knobs(arguments: Sequence[str], menu: Menu) -> tuple[list[str], tuple[str, ...]]:
    """Return the arguments, changed so that every knob that only some swept options have is added to every job. Also
    return these knobs.

    Raises:
        UserError: none of the swept options has a knob.
    """
    parser = OverridesParser.create()
    overrides = {text: parser.parse_override(text) for text in arguments if "=" in text and not text.startswith("-")}
    swept = {
        override.key_or_group: swept_options(override, menu.groups[override.key_or_group])
        for override in overrides.values()
        if override.key_or_group in menu.groups and override.is_sweep_override()
    }
    forced = {text: override.key_or_group for text, override in overrides.items() if _is_of_some(override, swept, menu)}
    return [f"{FORCE}{text.lstrip('+')}" if text in forced else text for text in arguments], tuple(forced.values())


def take_out(composed: DictConfig, knobs: Sequence[str]) -> list[str]:
    """Remove from a composed job those of `knobs` that its options do not have, and return them."""
    found: list[str] = []
    for knob in knobs:
        group, _, key = knob.rpartition(".")
        node = OmegaConf.select(composed, group)
        schema = OmegaConf.get_type(node)
        if dataclasses.is_dataclass(schema) and key not in {field.name for field in dataclasses.fields(schema)}:
            with open_dict(node):
                node.pop(key, None)
            found.append(knob)
    return found


def _is_of_some(override: Override, swept: dict[str, list[str]], menu: Menu) -> bool:
    name = override.key_or_group
    group = name.partition(".")[0]
    if name not in menu.keys or group not in swept:
        return False
    owners = menu.keys[name].defaults
    having = [option for option in swept[group] if option in owners]
    if not having:
        raise UserError(
            f"{override.input_line}: {name} belongs to {', '.join(owners)}, and none of {', '.join(swept[group])} "
            f"reads it; leave it out, or add one of them to {group}="
        )
    return len(having) < len(swept[group])
