"""The drafters that can be trained: a row for each, with its schema, what trains it, and what it has to fit.

Imports no torch: what trains a drafter is named, and imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.assembly.deferred import Deferred
from spec_lab.train.config import (
    DrafterChoice,
    DraftModelTrainingConfig,
    Eagle3TrainingConfig,
    FrozenKvTrainingConfig,
    MtpEagleTrainingConfig,
    MtpVanillaTrainingConfig,
    NoDrafterChoice,
    PocketTrainingConfig,
    ShippedTarget,
    TrainConfig,
)
from spec_lab.train.fitting import (
    Fitting,
    draft_vocabulary,
    heads,
    kv_sources,
    measured_drafts,
    taps,
    unrolled_steps,
    width,
)

if TYPE_CHECKING:
    from spec_lab.train.drafter import DrafterRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrainingOption:
    """`drafter=` of a training.

    Attributes:
        recipe: takes the `drafter` part and makes what trains it; None where there is nothing to train.
        refusals: what does not fit the target or the evaluation; asked only of trainings that chose it.
    """

    name: str
    schema: type[DrafterChoice]
    recipe: Callable[..., DrafterRecipe] | None = None
    refusals: tuple[Callable[[Fitting], str | None], ...] = ()


DRAFTERS: tuple[DrafterTrainingOption, ...] = (
    DrafterTrainingOption(name="none", schema=NoDrafterChoice),
    DrafterTrainingOption(
        name="eagle3",
        schema=Eagle3TrainingConfig,
        recipe=Deferred("spec_lab.train.eagle3_recipe", "Eagle3Recipe"),
        refusals=(heads, taps, draft_vocabulary),
    ),
    DrafterTrainingOption(
        name="mtp_eagle",
        schema=MtpEagleTrainingConfig,
        recipe=Deferred("spec_lab.train.mtp_recipe", "MtpRecipe"),
        refusals=(heads, unrolled_steps, measured_drafts),
    ),
    DrafterTrainingOption(
        name="mtp_vanilla",
        schema=MtpVanillaTrainingConfig,
        recipe=Deferred("spec_lab.train.mtp_recipe", "MtpRecipe"),
        refusals=(heads, unrolled_steps, measured_drafts),
    ),
    DrafterTrainingOption(
        name="frozen_kv",
        schema=FrozenKvTrainingConfig,
        recipe=Deferred("spec_lab.train.frozen_kv_recipe", "FrozenKVRecipe"),
        refusals=(width, kv_sources),
    ),
    DrafterTrainingOption(
        name="draft_model",
        schema=DraftModelTrainingConfig,
        recipe=Deferred("spec_lab.train.draft_model_recipe", "DraftModelRecipe"),
        refusals=(heads, width),
    ),
)

SCHEMAS: dict[str, type] = {
    "train": TrainConfig,
    "train/target/shipped": ShippedTarget,
    "train/target/pocket": PocketTrainingConfig,
    **{f"train/drafter/{option.name}": option.schema for option in DRAFTERS},
}


def drafter_option(drafter: DrafterChoice) -> DrafterTrainingOption:
    """The row of the drafter that a training names."""
    return next(option for option in DRAFTERS if option.name == drafter.name)
