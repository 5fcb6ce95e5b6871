"""Names what a run chose in a group: the option, and each knob that has another value than the option gives it.

| typed | name |
|---|---|
| `prune=catchup` | `catchup` |
| `acceptance=relaxed_thinking acceptance.topk=3` | `relaxed_thinking+topk3` |
| `graph=full_loop graph.verify=false` | `full_loop+verify_false` |
| `target=hf target.path=/models/Qwen3-1.7B` | `hf+Qwen3-1.7B`: a folder by its last part alone |

A logger has the name of its option alone. The drafter's K is left out, since tables have a column for it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from spec_lab.config.groups import LoggerConfig

MAX_LENGTH = 48
UNFIT_FOR_A_FILE = re.compile(r"[^A-Za-z0-9._,+-]+")
IN_A_COLUMN = "num_draft_tokens"


def label(option: str, part: Any, usual: Any) -> str:
    """Return the name of a part of a run. `usual` is what its option composes to alone."""
    if isinstance(part, LoggerConfig):
        return option
    if type(part) is not type(usual) or getattr(part, "name", "") != getattr(usual, "name", ""):
        option, usual = part.name, type(part)(name=part.name)  # the lab chose it for `auto`
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.name != IN_A_COLUMN}
    differing = [shown(key, value) for key, value in values.items() if value != getattr(usual, key)]
    return fit_for_a_file("+".join([option, *differing]), MAX_LENGTH)


def shown(key: str, value: Any) -> str:
    """Return a knob and its value, such as `topk3` or `verify_false`; for a path, its last part alone."""
    if key.endswith("path") and isinstance(value, str):
        return Path(value).name
    if value is None or isinstance(value, bool):
        return f"{key}_{str(value).lower().replace('none', 'null')}"
    is_number = isinstance(value, (int, float)) and not key[-1].isdigit()
    text = f"{value:g}" if isinstance(value, float) else ",".join(map(str, value)) if isinstance(value, list) else value
    return f"{key}{'' if is_number else '_'}{text}"


def fit_for_a_file(name: str, length: int) -> str:
    """Return the beginning of a name, in a form that is valid for a file."""
    return UNFIT_FOR_A_FILE.sub("_", name)[:length].rstrip("-+._,")
