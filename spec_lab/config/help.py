"""What `--help` prints: the options of each group, and every key with its explanation, bounds and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

from spec_lab.config.checks import WORDS
from spec_lab.config.option import VALUES, options, schemas
from spec_lab.config.run import GROUPS, Run

USAGE = """python -m spec_lab KEY=VALUE ...       one run; -m for a sweep over comma-separated values
python -m spec_lab --help GROUP ...     the options and keys of a group; --hydra-help has Hydra's flags"""


def keys(*of: type) -> Mapping[str, dataclasses.Field[Any]]:
    """Return every key that can be typed, or those of the classes given, with its field."""
    found: dict[str, dataclasses.Field[Any]] = {}
    everything: dict[str, type] = {"run": Run, **schemas()}
    for path, schema in everything.items():
        if not of or schema in of:
            found = dict(_keys(schema, "" if schema is Run else f"{path.partition('/')[0]}.")) | found
    return found


def _keys(schema: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        yield prefix + field.name, field
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")


def help_text(folders: Sequence[Path], groups: Sequence[str] = ()) -> str:
    """Return the help of these groups, or of all; the folders have a YAML file for each option."""
    lines = [USAGE]
    for group in groups or GROUPS:
        lines.append(f"\n{group}=...")
        files = sorted(file for conf in folders for file in (conf / group).glob("*.yaml"))
        lines += [f"  {file.stem:20} {_second_comment(file)}" for file in files]
        shown = [key for key in keys() if key.startswith(f"{group}.") and not key.endswith(".name")]
        lines += [f"    {key:34} {_explained(key)}" for key in shown]
    if not groups:
        lines.append("\nall other keys")
        lines += [f"    {key:34} {_explained(key)}" for key in keys() if key.partition(".")[0] not in GROUPS]
    return "\n".join(lines)


def _second_comment(file: Path) -> str:
    return file.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")


def _values(kind: type) -> Iterator[str]:
    """Yield the values of a knob that has a fixed set of them, each with its explanation."""
    for value in kind if issubclass(kind, StrEnum) else ():
        explanation = getattr(value, "help", "")
        yield f"{value} ({explanation})" if explanation else str(value)


def _explained(key: str) -> str:
    field = keys()[key]
    default = field.default_factory() if callable(field.default_factory) else field.default
    bounds = [f"{word} {field.metadata[side]}" for side, word in WORDS.items() if field.metadata.get(side) is not None]
    values = ", ".join(options(key)) if key in VALUES else ", ".join(_values(type(default)))
    shown = "" if default is dataclasses.MISSING or dataclasses.is_dataclass(default) else f" [{default}]"
    return "; ".join(filter(None, [field.metadata.get("help", ""), values, ", ".join(bounds)])) + shown
