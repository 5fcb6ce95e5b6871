"""Writes a command that repeats a recorded run: what was typed, or for a run of a notebook all of its knobs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from spec_lab.record.runs import Run
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.differing import knobs_of

START = "python -m spec_lab"


def command_of(run: Run) -> str:
    """Return a command that composes to what the run measured, quoted for a POSIX shell."""
    typed = run.folder / ".hydra" / "overrides.yaml"
    if typed.exists():
        words = yaml.safe_load(typed.read_text())
        return _line([*words, "hydra.mode=RUN"] if any(word.startswith("experiment=") for word in words) else words)
    config = run.summary["config"]
    return _line([*_groups(config, run.summary["choices"]), *_overrides(config)])


def _groups(config: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
    named = {group: config[group]["name"] for group in choices if _has_name(config.get(group))}
    return [f"{group}={option}" for group, option in named.items() if group not in BESIDE_THE_RUN]


def _has_name(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("name"), str)


def _overrides(config: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_value(value)}" for name, value in knobs_of(config).items() if not name.endswith(".name")]


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
