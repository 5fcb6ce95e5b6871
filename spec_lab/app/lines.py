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


def store_lines(arguments: Sequence[str], folders: Iterable[Path], groups: Collection[str]) -> None:
    """Make the lines of the typed experiment known to Hydra.

    Args:
        folders: where its YAML may be, beside the folder of a typed `--config-dir`.
        groups: the groups of a run; an override of one of them chooses its option.
    """
    names = [word.partition("=")[2] for word in arguments if word.startswith("experiment=")]
    own = [Path(place) for word, place in itertools.pairwise(arguments) if word in ("--config-dir", "-cd")]
    files = [folder / "experiment" / f"{name}.yaml" for name in names for folder in (*own, *folders)]
    for file in [file for file in files if file.is_file()][:1]:
        study = yaml.safe_load(file.read_text(encoding="utf-8")).get("study") or {}
        for line, overrides in (study.get("lines") or {}).items():
            node = _node(overrides, groups)
            ConfigStore.instance().store(str(line), node, group="line", package="_global_")


def _node(overrides: Sequence[str], groups: Collection[str]) -> dict[str, Any]:
    """Return the configuration that some overrides make, with their options in the defaults."""
    chosen = [word.partition("=") for word in overrides if word.partition("=")[0] in groups]
    values = OmegaConf.from_dotlist([word for word in overrides if word.partition("=")[0] not in groups])
    node: Any = OmegaConf.to_container(values)
    return {"defaults": ["_self_", *({f"override /{group}": option} for group, _, option in chosen)], **node}
