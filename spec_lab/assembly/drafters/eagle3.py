"""This module holds the row of drafter=eagle3: its keys and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import (
    DrafterWeights,
    TrainedDrafterConfig,
    path_beside_random_weights,
    zoo_folders,
)
from spec_lab.assembly.option import DrafterOption
from spec_lab.config import RunConfig, Weights, knob

WEIGHTS = DrafterWeights(zoo_folders("eagle3"))


@dataclass
class Eagle3DrafterConfig(TrainedDrafterConfig):
    """drafter=eagle3: a one-layer EAGLE-3 head."""

    name: str = "eagle3"
    window: int | None = knob(None, "newest keys the head's attention sees; null is all of them")
    weights: Weights = knob(Weights.checkpoint, "where the head's weights come from")
    draft_vocab_size: int | None = knob(
        None, "tokens that random weights can draft; null is all of the target's; a checkpoint has its own", least=1
    )


def window_shows_a_row(config: RunConfig) -> str | None:
    """A row sees itself at least."""
    options: Any = config.drafter
    if options.window is None or options.window >= 1:
        return None
    return (
        f"drafter.window={options.window} hides a row from itself; use drafter.window=1 or more, or "
        "drafter.window=null for all keys"
    )


def weights_or_random(config: RunConfig) -> str | None:
    """A checkpoint says itself how many tokens it drafts, and random weights lie nowhere."""
    options: Any = config.drafter
    if options.weights == Weights.checkpoint:
        if options.draft_vocab_size is None:
            return WEIGHTS.missing(config)
        size = options.draft_vocab_size
        return f"drafter.draft_vocab_size={size} is read with drafter.weights=random only; leave it out"
    return path_beside_random_weights(options)


OPTION = DrafterOption(
    name="eagle3",
    schema=Eagle3DrafterConfig,
    load=Deferred("spec_lab.assembly.drafters.eagle3_loader", "load_eagle3_drafter"),
    refusals=(weights_or_random, window_shows_a_row),
    folder=WEIGHTS.folder,
    aspects=Deferred("spec_lab.doctor.aspects", "eagle3_aspects"),
    hands_hidden_on=True,
    load_tree=Deferred("spec_lab.assembly.drafters.eagle3_loader", "load_eagle3_tree_drafter"),
    notes_confidence=True,
    ingests_in_graphs=True,
)
