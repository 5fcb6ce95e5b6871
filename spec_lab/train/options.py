"""The drafters that can be trained: a row for each, with its schema, what trains it, and what it has to fit.

Imports no torch: what trains a drafter is named, and imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.assembly.deferred import Deferred
from spec_lab.train.config import TrainConfig
from spec_lab.train.drafter_config import (
    AssistantTrainingConfig,
    DrafterChoice,
    DraftModelTrainingConfig,
    Eagle3TrainingConfig,
    FrozenKvTrainingConfig,
    MtpEagleTrainingConfig,
    MtpVanillaTrainingConfig,
    NextnTrainingConfig,
    NoDrafterChoice,
)
from spec_lab.train.fitting import (
    Fitting,
    assistant_heads,
    chosen_experts,
    delta_heads,
    draft_vocabulary,
    heads,
    kv_sources,
    measured_drafts,
    owned_layers,
    taps,
    target_heads,
    unrolled_steps,
    width,
)
from spec_lab.train.target_config import (
    PocketGemmaTrainingConfig,
    PocketHybridTrainingConfig,
    PocketMoeTrainingConfig,
    PocketTrainingConfig,
    ShippedTarget,
    TargetChoice,
)

if TYPE_CHECKING:
    from spec_lab.train.drafter import DrafterRecipe
    from spec_lab.train.target import NewTarget


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTrainingOption:
    """`target=` of a training.

    Attributes:
        recipe: takes the `target` part and makes what trains it; None where it is taken as it lies.
        drafters: those that are trained for it, beside none.
        refusals: what of its sizes does not fit.
    """

    name: str
    schema: type[TargetChoice]
    recipe: Callable[..., NewTarget] | None = None
    drafters: tuple[str, ...]
    refusals: tuple[Callable[[Any], str | None], ...] = ()


QWEN3_DRAFTERS = ("eagle3", "mtp_eagle", "mtp_vanilla", "frozen_kv", "draft_model")
DECODER_RECIPE = Deferred("spec_lab.train.decoder_recipe", "DecoderRecipe")

TARGETS: tuple[TargetTrainingOption, ...] = (
    TargetTrainingOption(name="shipped", schema=ShippedTarget, drafters=QWEN3_DRAFTERS),
    TargetTrainingOption(
        name="pocket",
        schema=PocketTrainingConfig,
        recipe=Deferred("spec_lab.train.target", "TargetRecipe"),
        drafters=QWEN3_DRAFTERS,
        refusals=(target_heads,),
    ),
    TargetTrainingOption(
        name="pocket_hybrid",
        schema=PocketHybridTrainingConfig,
        recipe=DECODER_RECIPE,
        drafters=("nextn",),
        refusals=(target_heads, delta_heads),
    ),
    TargetTrainingOption(
        name="pocket_gemma",
        schema=PocketGemmaTrainingConfig,
        recipe=DECODER_RECIPE,
        drafters=("assistant",),
        refusals=(target_heads, owned_layers),
    ),
    TargetTrainingOption(
        name="pocket_moe",
        schema=PocketMoeTrainingConfig,
        recipe=DECODER_RECIPE,
        drafters=("nextn",),
        refusals=(chosen_experts,),
    ),
)

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
    DrafterTrainingOption(
        name="nextn", schema=NextnTrainingConfig, recipe=Deferred("spec_lab.train.nextn_recipe", "NextnRecipe")
    ),
    DrafterTrainingOption(
        name="assistant",
        schema=AssistantTrainingConfig,
        recipe=Deferred("spec_lab.train.assistant_recipe", "AssistantRecipe"),
        refusals=(width, assistant_heads),
    ),
)

SCHEMAS: dict[str, type] = {
    "train": TrainConfig,
    **{f"train/target/{option.name}": option.schema for option in TARGETS},
    **{f"train/drafter/{option.name}": option.schema for option in DRAFTERS},
}


def target_option(target: TargetChoice) -> TargetTrainingOption:
    """Return the row of the target that a training names."""
    return next(option for option in TARGETS if type(target) is option.schema)


def drafter_option(drafter: DrafterChoice) -> DrafterTrainingOption:
    """Return the row of the drafter that a training names."""
    return next(option for option in DRAFTERS if option.name == drafter.name)
