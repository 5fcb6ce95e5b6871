"""The options of `target` and `drafter` of a training: a row for each, with its schema, its recipe and its checks.

It does not import torch: recipes are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.block_config import Slots, no_place
from spec_lab.checkpoints.block_heads import HeadKind
from spec_lab.train.block_config import (
    BlockTrainingConfig,
    Dflash2TrainingConfig,
    DominoTrainingConfig,
    DsparkTrainingConfig,
    LilicorrTrainingConfig,
    PEagleTrainingConfig,
)
from spec_lab.train.config import TrainConfig
from spec_lab.train.drafter_config import (
    DrafterChoice,
    DraftModelTrainingConfig,
    Eagle3TrainingConfig,
    FrozenKvTrainingConfig,
    MtpEagleTrainingConfig,
)
from spec_lab.train.fitting import (
    Fitting,
    body_serves,
    candidates_fit,
    draft_vocabulary,
    drafts_fit,
    heads,
    kv_sources,
    parts_are_read,
    taps,
    tokens_fit,
    width,
)
from spec_lab.train.frozen_paths import (
    checkpoint_path,
    is_there,
    needs_a_path,
    package_is_here,
    packaged_path,
    shipped_path,
)
from spec_lab.train.target_config import (
    HfTarget,
    PocketTarget,
    SmolLm2Target,
    TargetChoice,
)

if TYPE_CHECKING:
    from spec_lab.train.head_recipe import HeadRecipe
    from spec_lab.train.layouts import OtherLayout


@dataclass(frozen=True, slots=True)
class LayoutOption:
    """Another project's layout of a drafter.

    Attributes:
        load: returns the layout's writer.
        lacks: takes the `drafter` part, and names what the layout does not support; None if it supports everything.
    """

    load: Callable[[], OtherLayout]
    lacks: Callable[[Any], str | None] = lambda drafter: None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrainingOption:
    """`drafter=` of a training.

    Attributes:
        recipe: makes the recipe from the `drafter` part.
        refusals: checks against the target and the evaluation, only for trainings that chose this option.
        layouts: other projects' layouts by name, which `layouts` may select.
    """

    name: str
    schema: type[DrafterChoice]
    recipe: Callable[..., HeadRecipe]
    refusals: tuple[Callable[[Fitting], str | None], ...] = ()
    layouts: Mapping[str, LayoutOption] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTrainingOption:
    """`target=` of a training.

    Attributes:
        path: returns its checkpoint, given the `target` part.
        refusals: checks of the `target` part.
    """

    name: str
    schema: type[TargetChoice]
    path: Callable[[Any], Path]
    refusals: tuple[Callable[[Any], str | None], ...] = ()


def eagle3_recipe(options: Any) -> HeadRecipe:
    """Make the recipe of a drafter with these options."""
    from spec_lab.train.eagle3_recipe import Eagle3Recipe

    return Eagle3Recipe(options)


def mtp_recipe(options: Any) -> HeadRecipe:
    """Make the recipe of a drafter with these options."""
    from spec_lab.train.mtp_recipe import MtpRecipe

    return MtpRecipe(options)


def frozen_kv_recipe(options: Any) -> HeadRecipe:
    """Make the recipe of a drafter with these options."""
    from spec_lab.train.frozen_kv_recipe import FrozenKVRecipe

    return FrozenKVRecipe(options)


def draft_model_recipe(options: Any) -> HeadRecipe:
    """Make the recipe of a drafter with these options."""
    from spec_lab.train.draft_model_recipe import DraftModelRecipe

    return DraftModelRecipe(options)


def block_recipe(options: Any) -> HeadRecipe:
    """Make the recipe of a drafter with these options."""
    from spec_lab.train.blocks.recipe import BlockRecipe

    return BlockRecipe(options)


def p_eagle_recipe(options: Any) -> HeadRecipe:
    """Make the recipe of a drafter with these options."""
    from spec_lab.train.blocks.p_eagle_recipe import PEagleRecipe

    return PEagleRecipe(options)


def other_layout(kind: str, name: str) -> OtherLayout:
    """Return the writer of a kind of drafter in another project's layout."""
    from spec_lab.train.layouts import LAYOUTS

    return LAYOUTS[kind, name]


def lacks_a_place(layout: str, drafter: BlockTrainingConfig) -> str | None:
    """Return the override of a block drafter that a layout does not support; None if it supports all of them."""
    head, slots = HeadKind(drafter.head.value), Slots(drafter.slots.value)
    knob = no_place(layout, head, slots, drafter.conv, drafter.draft_vocab_size is not None)
    return None if knob is None else f"drafter.{knob}={getattr(drafter, knob)}"


BLOCKS: tuple[type[BlockTrainingConfig], ...] = (
    BlockTrainingConfig,
    DsparkTrainingConfig,
    DominoTrainingConfig,
    Dflash2TrainingConfig,
    LilicorrTrainingConfig,
)
OF_BLOCKS = tuple(schema.name for schema in BLOCKS)
TARGETS: tuple[TargetTrainingOption, ...] = (
    TargetTrainingOption(name="pocket", schema=PocketTarget, refusals=(is_there,), path=shipped_path),
    TargetTrainingOption(name="hf", schema=HfTarget, refusals=(needs_a_path,), path=checkpoint_path),
    TargetTrainingOption(name="smollm2_135m", schema=SmolLm2Target, refusals=(package_is_here,), path=packaged_path),
)

DRAFTERS: tuple[DrafterTrainingOption, ...] = (
    DrafterTrainingOption(
        name="eagle3",
        schema=Eagle3TrainingConfig,
        recipe=eagle3_recipe,
        refusals=(heads, taps, draft_vocabulary),
        layouts={"speculators": LayoutOption(partial(other_layout, "eagle3", "speculators"))},
    ),
    DrafterTrainingOption(
        name="mtp_eagle",
        schema=MtpEagleTrainingConfig,
        recipe=mtp_recipe,
        refusals=(heads,),
    ),
    DrafterTrainingOption(
        name="frozen_kv",
        schema=FrozenKvTrainingConfig,
        recipe=frozen_kv_recipe,
        refusals=(width, kv_sources),
    ),
    DrafterTrainingOption(
        name="draft_model",
        schema=DraftModelTrainingConfig,
        recipe=draft_model_recipe,
        refusals=(heads, width),
    ),
)

DRAFTERS += tuple(
    DrafterTrainingOption(
        name=schema.name,
        schema=schema,
        recipe=block_recipe,
        refusals=(parts_are_read, drafts_fit, tokens_fit, candidates_fit, body_serves),
        layouts={
            name: LayoutOption(partial(other_layout, "block", name), partial(lacks_a_place, name))
            for name in ("speculators", "deepspec")
        },
    )
    for schema in BLOCKS
)
DRAFTERS += (
    DrafterTrainingOption(
        name="p_eagle", schema=PEagleTrainingConfig, recipe=p_eagle_recipe, refusals=(taps, drafts_fit, tokens_fit)
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
