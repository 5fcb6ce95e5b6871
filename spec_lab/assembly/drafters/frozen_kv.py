"""This module holds the row of drafter=frozen_kv: its keys and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import DrafterWeights, TrainedDrafterConfig, zoo_folders
from spec_lab.assembly.option import DrafterOption
from spec_lab.assembly.targets import SHAPES
from spec_lab.config import Choice, RunConfig, Weights, knob

ASSISTANT_SHAPES = {name: SHAPES / f"{name}_assistant" for name in ("gemma4_31b", "gemma4_e4b")}
"""The config.json of the assistant of each target that is a shape."""


@dataclass(frozen=True, slots=True)
class AssistantWeights(DrafterWeights):
    """The weights may be random. An assistant's sizes do not follow from its target's: a config.json has them."""

    def folder_of_config(self, config: RunConfig, options: Any) -> Path:
        """Find the folder of the assistant, of whose files config.json alone is read where weights are random."""
        if options.weights == Weights.random and options.path is None:
            return ASSISTANT_SHAPES[config.target.name]
        return self.folder(config, options)

    def missing_or_unknown(self, config: RunConfig) -> str | None:
        """There are weights, or sizes for random ones."""
        options: Any = config.drafter
        if options.weights != Weights.random or options.path is not None:
            return self.missing(config)
        if config.target.name in ASSISTANT_SHAPES:
            return None
        return (
            f"drafter.weights=random: the sizes of an assistant of target={config.target.name} are not known; use "
            f"target={' or '.join(ASSISTANT_SHAPES)}, or drafter.path=FOLDER with a config.json"
        )


WEIGHTS = AssistantWeights(zoo_folders("frozen_kv"))


class FrozenKvPosition(Choice):
    """The position at which every draft step of a frozen-KV drafter stands."""

    last = "last", "SGLang, vLLM"
    bonus = "bonus", "transformers; its sliding windows are a key wider"


@dataclass
class FrozenKvDrafterConfig(TrainedDrafterConfig):
    """drafter=frozen_kv: queries only, over the target's KV (the Gemma 4 assistant)."""

    name: str = "frozen_kv"
    position: FrozenKvPosition = knob(FrozenKvPosition.last, "where every draft step stands")
    weights: Weights = knob(
        Weights.checkpoint, "where the assistant's weights come from; its sizes are a config.json's"
    )


OPTION = DrafterOption(
    name="frozen_kv",
    schema=FrozenKvDrafterConfig,
    load=Deferred("spec_lab.assembly.drafters.frozen_kv_loader", "load_frozen_kv_drafter"),
    refusals=(WEIGHTS.missing_or_unknown,),
    folder=WEIGHTS.folder_of_config,
    aspects=Deferred("spec_lab.doctor.aspects", "frozen_kv_aspects"),
    hands_hidden_on=True,
    load_tree=Deferred("spec_lab.assembly.drafters.frozen_kv_loader", "load_frozen_kv_tree_drafter"),
    no_moves="stands at one position in all its steps",
    notes_confidence=True,
    ingests_in_graphs=True,
)
