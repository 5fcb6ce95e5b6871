"""Names a run: each group by the option that has its knobs, or if there is none, with the knobs that differ.

| typed | name |
|---|---|
| `prune=catchup` | `catchup` |
| `prune.prefill=last_row prune.catchup=pre_attention` | `catchup`: its knobs all equal that option's |
| `prune.catchup=pre_attention` | `all_rows+pre_attention`: no option has these knobs, so they are the name |
| `sampling.temperature=0.7` | `temperature0.7` |
| `graph=round graph.overlap=true` | `round_overlap` |
| `acceptance=relaxed_thinking acceptance.topk=3` | `relaxed_thinking+topk3` |
| `graph=full_loop graph.verify=false` | `full_loop+verify_false` |
| `target=hf target.path=/models/Qwen3-1.7B` | `hf+Qwen3-1.7B`: a folder by its last part alone |

The name of a group does not tell everything. A logger has the name of its option alone, and of a folder only the last
part counts. The drafter's K is left out, since tables have a column for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.menu.bounds import default_of
from spec_lab.menu.config import RunConfig
from spec_lab.program.options import Group, OptionFile

MAX_LENGTH = 48
UNFIT_FOR_A_FILE = re.compile(r"[^A-Za-z0-9._,+-]")
SHOWN_ELSEWHERE = ("drafter.num_draft_tokens",)
NOT_PART_OF_THE_RUN = ("logger",)

Knobs = dict[str, Any]


def name_groups(config: RunConfig, chosen: Mapping[str, str], groups: Mapping[str, Group]) -> dict[str, str]:
    """Return the name of each group. `chosen` has the option chosen in each of them; `groups` has all groups.

    Groups that are not part of the configuration, such as experiments, keep the option's name, and so does the logger.
    """
    return {
        name: _name(groups[name], option, getattr(config, name))
        if hasattr(config, name) and name not in NOT_PART_OF_THE_RUN
        else option
        for name, option in chosen.items()
    }


def _name(group: Group, chosen: str, part: Any) -> str:
    presets = {
        option.name: _without_hidden(group, _preset(option, option.schema))
        for option in group.options.values()
        if option.schema is type(part)
    }
    knobs = _without_hidden(group, {field.name: getattr(part, field.name) for field in dataclasses.fields(part)})
    equal = [option for option, preset in presets.items() if preset == knobs]
    if equal or not presets:
        return chosen if chosen in equal or not equal else equal[0]
    return _short(_from_option(presets, chosen, knobs) if "name" in knobs else _from_knobs(presets, knobs))


def _preset(option: OptionFile, schema: type) -> Knobs:
    return {field.name: option.values.get(field.name, default_of(field)) for field in dataclasses.fields(schema)}


def _without_hidden(group: Group, knobs: Knobs) -> Knobs:
    return {key: value for key, value in knobs.items() if f"{group.name}.{key}" not in SHOWN_ELSEWHERE}


def _from_option(presets: Mapping[str, Knobs], chosen: str, knobs: Knobs) -> str:
    """Return the nearest option that builds the same part, and the differences from it. Return `chosen` if no option
    builds that part."""
    alike = {option: preset for option, preset in presets.items() if preset["name"] == knobs["name"]}
    if not alike:
        return chosen
    differing = {option: [key for key in knobs if knobs[key] != preset[key]] for option, preset in alike.items()}
    nearest = min(differing, key=lambda option: (len(differing[option]), option != chosen))
    return "+".join([nearest, *(_with_key(key, knobs[key]) for key in differing[nearest])])


def _from_knobs(presets: Mapping[str, Knobs], knobs: Knobs) -> str:
    """Return the values of all knobs in which the options differ, a text as it is and others by `_with_key`. Also add
    each other knob whose value no option has."""
    parts = []
    for key, value in knobs.items():
        usual = [preset[key] for preset in presets.values()]
        if any(other != usual[0] for other in usual):
            parts.append(str(value) if isinstance(value, str) else _with_key(key, value))
        elif value != usual[0]:
            parts.append(_with_key(key, value))
    return "+".join(parts)


def _with_key(key: str, value: Any) -> str:
    """Return a knob and its value, such as `topk3` or `verify_false`; for a folder, the last part of its path alone."""
    if (key == "path" or key.endswith("_path")) and isinstance(value, str):
        return Path(value).absolute().name
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{key}{'' if is_number and not key[-1].isdigit() else '_'}{_show(value)}"


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return ",".join(".".join(map(str, item)) if isinstance(item, list) else _show(item) for item in value)
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _short(name: str) -> str:
    """Return the name in a form that is valid for a file. If it had to be changed or cut, a hash of the whole is
    added."""
    fit = UNFIT_FOR_A_FILE.sub("_", name)
    if fit == name and len(name) <= MAX_LENGTH:
        return name
    digits = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{fit[: MAX_LENGTH - 9]}+{digits}"
