"""A study's lines: named lists of overrides in its YAML, which Hydra sweeps as the options of the group `line`.

study:
  lines:
    strict: [acceptance=strict]
    loose: [acceptance=relaxed_thinking, acceptance.delta=0.6]
hydra:
  sweeper:
    params: {line: "strict,loose", drafter.num_draft_tokens: "1,3"}
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from spec_lab.core.errors import UserError

EXPERIMENT = "experiment"
LINE = "line"


def store_lines(arguments: Sequence[str], folders: Iterable[Path], groups: Collection[str]) -> None:
    """Make the lines of the typed experiment known to Hydra.

    Args:
        folders: where its YAML may be, beside the folder of a typed `--config-dir`.
        groups: the groups of a run; an override of one of them chooses its option.
    """
    names = [word.partition("=")[2] for word in arguments if word.startswith(f"{EXPERIMENT}=")]
    own = [Path(place) for word, place in itertools.pairwise(arguments) if word in ("--config-dir", "-cd")]
    for name in names:
        for folder in (*own, *folders):
            file = folder / EXPERIMENT / f"{name}.yaml"
            if file.is_file():
                lines = (yaml.safe_load(file.read_text(encoding="utf-8")).get("study") or {}).get("lines") or {}
                for line, overrides in lines.items():
                    ConfigStore.instance().store(
                        str(line), _node(overrides, groups, file), group=LINE, package="_global_"
                    )
                break


def _node(overrides: Sequence[str], groups: Collection[str], file: Path) -> dict[str, Any]:
    """Return the configuration that some overrides make, with their options in the defaults."""
    chosen, values = [], OmegaConf.create()
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"{file}: {override} is no override; a line is a list of KEY=VALUE")
        if key in groups:
            chosen.append({f"override /{key}": value})
        else:
            OmegaConf.update(values, key, yaml.safe_load(value))
    node: Any = OmegaConf.to_container(values)
    return {"defaults": ["_self_", *chosen], **node} if chosen else node


def by_size(small: Any, full: Any, *, _root_: Any) -> Any:
    """Return the one of two values that `size` asks for: `${by_size:9,180}`."""
    return full if _root_.size == "full" else small
