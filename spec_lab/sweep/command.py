"""The command of a sweep file, which W&B's agent would start. A run here gets the same overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spec_lab.core.errors import UserError

PARAMETERS = "${args_no_hyphens}"
BEGINNING = ("${env}", "${interpreter}", "-m", "spec_lab")
EXAMPLE = f"command: [{', '.join(map(json.dumps, (*BEGINNING, PARAMETERS)))}]"


def fixed_overrides(command: Sequence[Any] | None) -> tuple[str, ...]:
    """Return the overrides that a sweep file's command gives every run in addition to its parameters.

    Raises:
        UserError: W&B's agent would not start `python -m spec_lab KEY=VALUE...` with it.
    """
    if command is None:
        raise UserError(f"command: without it W&B passes --KEY=VALUE, which spec_lab does not take; add {EXAMPLE}")
    if tuple(command[: len(BEGINNING)]) != BEGINNING:
        raise UserError(f"command: it does not begin with {' '.join(BEGINNING)}; write {EXAMPLE}")
    rest = command[len(BEGINNING) :]
    if list(rest).count(PARAMETERS) != 1:
        raise UserError(f"command: it must pass {PARAMETERS} once; write {EXAMPLE}")
    overrides = [item for item in rest if item != PARAMETERS]
    for item in overrides:
        if not isinstance(item, str) or "=" not in item or item.startswith("-") or "${" in item:
            raise UserError(f"command: {item} is not KEY=VALUE; only overrides may be added to {PARAMETERS}")
    return tuple(overrides)


def as_overrides(parameters: Mapping[str, Any]) -> list[str]:
    """Return a run's parameters as W&B's agent writes them for `${args_no_hyphens}`."""
    return [f"{name}={value}" for name, value in parameters.items()]
