"""This module holds what drafters with weights share: their keys, where their weights lie, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.assembly import registry
from spec_lab.config import Choice, DrafterConfig, RunConfig, TargetConfig, knob
from spec_lab.errors import UserError

ZOO = Path(__file__).parents[2] / "zoo"


class DraftSampling(Choice):
    """The ways to pick drafts."""

    greedy = "greedy"
    distribution = "distribution", "at sampling.temperature"


@dataclass
class TrainedDrafterConfig(DrafterConfig):
    """The keys that every drafter with weights has."""

    path: str | None = knob(None, "folder of the drafter's weights; null is what is shipped for the target")
    draft_sampling: DraftSampling = knob(DraftSampling.greedy, "how drafts are picked")


def shipped_for_pocket(name: str) -> dict[str, Path]:
    """The weights of drafter `name` that are shipped, by target."""
    return {"pocket": ZOO / f"pocket-{name}"}


def shipped_folder(config: RunConfig) -> Path | None:
    """The weights of the run's drafter that are shipped for its target."""
    return registry.of(config).drafter(config).shipped.get(config.target.name)


def head_folder(config: RunConfig, options: TrainedDrafterConfig) -> Path:
    """`drafter.path`, or the weights shipped for the target.

    Raises:
        UserError: no path, and a target that nothing is shipped for.
    """
    if options.path is not None:
        return Path(options.path)
    shipped = shipped_folder(config)
    if shipped is None:
        raise UserError(no_weights_shipped(options, config.target))
    return shipped


def needs_weights(config: RunConfig) -> str | None:
    """The weights of a drafter that has them in a folder of its own."""
    options: Any = config.drafter
    if options.path is not None:
        return missing_folder("drafter.path", options.path)
    return None if shipped_folder(config) else no_weights_shipped(options, config.target)


def no_weights_shipped(options: DrafterConfig, target: TargetConfig, searched: str = "") -> str:
    """The refusal of a drafter without a path; `searched` says where else its weights were looked for."""
    return (
        f"no weights of drafter={options.name} are shipped for target={target.name}{searched}; "
        "give some with drafter.path=FOLDER or choose drafter=ngram"
    )


def missing_folder(knob: str, path: str) -> str | None:
    """The refusal of a path that is no folder."""
    return None if Path(path).is_dir() else f"{knob}={path} is no folder; give the folder of a checkpoint"


def sampled_drafts_need_a_temperature(config: RunConfig) -> str | None:
    """Sampled drafts are drawn at the run's temperature, which must be one. Greedy rules with them end here too."""
    sampling = getattr(config.drafter, "draft_sampling", DraftSampling.greedy)
    if sampling == DraftSampling.greedy or config.sampling.temperature > 0:
        return None
    return (
        f"drafter.draft_sampling={sampling} draws at sampling.temperature, which is 0; use "
        "drafter.draft_sampling=greedy or sampling.temperature=1 acceptance=rejection"
    )
