"""Makes the pipeline for a training's configuration."""

from __future__ import annotations

from spec_lab.train.checks import refuse, target_sizes
from spec_lab.train.config import TrainConfig
from spec_lab.train.fitting import filled
from spec_lab.train.group import training_device
from spec_lab.train.head_pipeline import HeadPipeline
from spec_lab.train.options import drafter_option, target_option
from spec_lab.train.pipeline import Pipeline


def build_pipeline(config: TrainConfig) -> Pipeline | HeadPipeline:
    """Make the pipeline for `config`: for a pocket target and its drafter, or for a drafter of a target such as hf.

    Raises:
        UserError: see `spec_lab.train.checks`.
    """
    refuse(config)
    if target_option(config.target).path is not None:
        return HeadPipeline(config, training_device(config.device))
    target, recipe = target_option(config.target).recipe, drafter_option(config.drafter).recipe
    return Pipeline(
        config,
        target=None if target is None else target(config.target),
        drafter=None if recipe is None else recipe(filled(config.drafter, target_sizes(config))),
    )
