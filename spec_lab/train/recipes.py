"""This module makes of a configuration what trains it; it is the only place where an option chooses a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec_lab.train.checks import refuse
from spec_lab.train.config import (
    DraftModelTrainingConfig,
    Eagle3TrainingConfig,
    FrozenKvTrainingConfig,
    MtpEagleTrainingConfig,
    MtpVanillaTrainingConfig,
    TrainConfig,
)
from spec_lab.train.draft_model_recipe import DraftModelRecipe
from spec_lab.train.drafter import DrafterRecipe
from spec_lab.train.eagle3_recipe import Eagle3Recipe
from spec_lab.train.frozen_kv_recipe import FrozenKVRecipe
from spec_lab.train.mtp_recipe import MtpRecipe
from spec_lab.train.pipeline import Pipeline
from spec_lab.train.target import TargetRecipe

DRAFTERS: dict[type, Callable[[Any], DrafterRecipe]] = {
    Eagle3TrainingConfig: Eagle3Recipe,
    MtpEagleTrainingConfig: MtpRecipe,
    MtpVanillaTrainingConfig: MtpRecipe,
    FrozenKvTrainingConfig: FrozenKVRecipe,
    DraftModelTrainingConfig: DraftModelRecipe,
}


def build_pipeline(config: TrainConfig) -> Pipeline:
    """The pipeline that trains what `config` says.

    Raises:
        UserError: see `spec_lab.train.checks`.
    """
    refuse(config)
    target, drafter = config.trained_target, config.trained_drafter
    return Pipeline(
        config,
        target=None if target is None else TargetRecipe(target),
        drafter=None if drafter is None else DRAFTERS[type(drafter)](drafter),
    )
