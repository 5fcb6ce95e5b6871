"""This module holds the row of drafter=draft_model: its keys and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import DrafterWeights, TrainedDrafterConfig, zoo_folders
from spec_lab.assembly.option import DrafterOption

WEIGHTS = DrafterWeights(zoo_folders("draft_model"))


@dataclass
class DraftModelDrafterConfig(TrainedDrafterConfig):
    """drafter=draft_model: a small language model of its own."""

    name: str = "draft_model"


OPTION = DrafterOption(
    name="draft_model",
    schema=DraftModelDrafterConfig,
    load=Deferred("spec_lab.assembly.drafters.draft_model_loader", "load_draft_model"),
    refusals=(WEIGHTS.missing,),
    folder=WEIGHTS.folder,
    load_tree=Deferred("spec_lab.assembly.drafters.draft_model_loader", "load_draft_model_of_trees"),
    notes_confidence=True,
)
