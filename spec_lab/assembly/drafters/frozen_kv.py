"""This module holds the row of drafter=frozen_kv: its keys and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import DrafterWeights, TrainedDrafterConfig, zoo_folders
from spec_lab.assembly.option import DrafterOption
from spec_lab.config import Choice, knob

WEIGHTS = DrafterWeights(zoo_folders("frozen_kv"))


class FrozenKvPosition(Choice):
    """The position at which every draft step of a frozen-KV drafter stands."""

    last = "last", "SGLang, vLLM"
    bonus = "bonus", "transformers; its sliding windows are a key wider"


@dataclass
class FrozenKvDrafterConfig(TrainedDrafterConfig):
    """drafter=frozen_kv: queries only, over the target's KV (the Gemma 4 assistant)."""

    name: str = "frozen_kv"
    position: FrozenKvPosition = knob(FrozenKvPosition.last, "where every draft step stands")


OPTION = DrafterOption(
    name="frozen_kv",
    schema=FrozenKvDrafterConfig,
    load=Deferred("spec_lab.assembly.drafters.frozen_kv_loader", "load_frozen_kv_drafter"),
    refusals=(WEIGHTS.missing,),
    folder=WEIGHTS.folder,
    aspects=Deferred("spec_lab.doctor.aspects", "frozen_kv_aspects"),
    hands_hidden_on=True,
    load_tree=Deferred("spec_lab.assembly.drafters.frozen_kv_loader", "load_frozen_kv_tree_drafter"),
    no_moves="stands at one position in all its steps",
    notes_confidence=True,
)
