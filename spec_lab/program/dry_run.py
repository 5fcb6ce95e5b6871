"""The output of `--dry-run`: the composed parts, a line each, the folder, and the refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from spec_lab.menu.auto import describe_auto
from spec_lab.menu.config import RunConfig
from spec_lab.menu.devices import runs_on_cuda
from spec_lab.program.folder import folder_name
from spec_lab.program.help import show_value


def describe(config: RunConfig, choices: Mapping[str, str], refused: list[str]) -> str:
    """Return lines with a run's parts, its folder and its refusals."""
    lines = []
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        if dataclasses.is_dataclass(part):
            values = {key.name: getattr(part, key.name) for key in dataclasses.fields(part) if key.name != "name"}
            lines.append(_line(field.name, choices.get(field.name, ""), values))
    rest = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if not dataclasses.is_dataclass(getattr(config, field.name)) and field.name not in ("dry_run", "auto")
    }
    lines += [_line(group, choices[group], {}) for group in ("experiment", "size", "debug") if group in choices]
    lines.append(_line("run", "", rest))
    if config.auto:
        place = "a CUDA device" if runs_on_cuda(config.device) else "a CPU"
        lines.append(_line("auto", f"{describe_auto(config)} (device={config.device}: {place})", {}))
    lines.append(_line("folder", f"{config.output_dir}/{folder_name(config, choices)}", {}))
    lines += [f"refused: {message}" for message in refused] or ["nothing is refused before the target's files are read"]
    return "\n".join(lines)


def _line(group: str, option: str, values: Mapping[str, object]) -> str:
    shown = " ".join(f"{key}={show_value(value)}" for key, value in values.items())
    return f"{group:12}{option:15} {shown}".rstrip()
