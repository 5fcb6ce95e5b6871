"""Writes a command that repeats a recorded run: the option of each group, and each knob that differs from it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.record.schema import Summary
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.differing import Missing, knobs_of

START = "python -m spec_lab"


def command_of(summary: Summary) -> str:
    """Return a command that composes to what the run measured, quoted for a POSIX shell.

    If one of its options is not installed here, the command names all knobs and says so in a # comment.
    """
    from spec_lab.program.compose import compose_run

    config = summary["config"]
    groups = _groups(config, summary["choices"])
    extensions = [f"extensions={_value(config['extensions'])}"] if config.get("extensions") else []
    try:
        usual, _ = compose_run([*extensions, *groups])
    except UserError:
        return f"{_line([*extensions, *groups, *_overrides(config, {})])}  # an option of it is not installed here"
    return _line([*extensions, *groups, *_overrides(config, asdict(usual))])


def _groups(config: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
    """Return the option of each group: the one with the configured name, else the one that names the run's choice. A
    group whose name in the record is no option is left out."""
    from spec_lab.program.options import read_groups

    known = read_groups()
    named = {group: config[group]["name"] for group in choices if _has_name(config.get(group))}
    called = {group: option for group, option in choices.items() if group in known and option in known[group].options}
    chosen = {**called, **named}
    return [f"{group}={option}" for group, option in chosen.items() if group in config and group not in BESIDE_THE_RUN]


def _has_name(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("name"), str)


def _overrides(config: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    before = knobs_of(usual)
    return [
        f"{name}={_value(value)}"
        for name, value in knobs_of(config).items()
        if name != "extensions" and before.get(name, Missing) != value
    ]


def _value(value: Any) -> str:
    """Write a value as Hydra reads it."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_value(item)}' for key, item in value.items())}}}"
    text = str(value)
    return text if text and all(letter.isalnum() or letter in "_-./" for letter in text) else json.dumps(text)


def _line(words: list[str]) -> str:
    return " ".join([START, *map(shlex.quote, words)])
