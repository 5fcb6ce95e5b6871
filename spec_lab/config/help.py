"""What `--help` prints: the options of each group, and every key with its explanation, bounds and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

from spec_lab.config.option import VALUES, default_of, options
from spec_lab.config.run import GROUPS, Run

USAGE = """python -m spec_lab KEY=VALUE ...       one run; -m for a sweep over comma-separated values
python -m spec_lab --help GROUP ...     the options and keys of a group; --hydra-help has Hydra's flags"""


def keys(own: bool = True) -> Mapping[str, dataclasses.Field[Any]]:
    """Return every key that can be typed, with its field; `own`: also those that not all options of a group have."""
    found = dict(_keys(Run, ""))
    for group in GROUPS if own else ():
        for schema in options(group).values():
            found = dict(_keys(schema, f"{group}.")) | found
    return found


def _keys(schema: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        yield prefix + field.name, field
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")


def help_text(folders: Sequence[Path], groups: Sequence[str] = ()) -> str:
    """Return the help of these groups, or of all; the folders have a YAML file for each option."""
    lines, known = [USAGE], keys()
    for group in groups or GROUPS:
        files = sorted(file for conf in folders for file in (conf / group).glob("*.yaml"))
        comments = (file.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ") for file in files)
        lines += [f"\n{group}=...", *(f"  {file.stem:20} {text}" for file, text in zip(files, comments, strict=True))]
        shown = (key for key in known if key.startswith(f"{group}.") and not key.endswith(".name"))
        lines += [_line(key, known[key]) for key in shown]
    if not groups:
        lines.append("\nall other keys")
        lines += [_line(key, field) for key, field in known.items() if key.partition(".")[0] not in GROUPS]
    return "\n".join(lines)


def _line(key: str, field: dataclasses.Field[Any]) -> str:
    default = default_of(field)
    bounds = [f"{word} {bound}" for word, bound in field.metadata.get("bounds", {}).items()]
    values = options(key) if key in VALUES else type(default) if isinstance(default, StrEnum) else ()
    told = ", ".join(f"{value} ({more})" if (more := getattr(value, "help", "")) else value for value in values)
    shown = "" if default is dataclasses.MISSING or dataclasses.is_dataclass(default) else f" [{default}]"
    return f"    {key:34} {'; '.join(filter(None, [field.metadata.get('help', ''), told, ', '.join(bounds)]))}{shown}"
