"""drafter=p_eagle: its keys, refusals and loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.menu.choices import Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig, TrainedDrafterConfig, knob
from spec_lab.menu.option import DrafterOption
from spec_lab.options.drafters.blocks import steps_are_replayed
from spec_lab.options.shipped import DrafterWeights, path_beside_random_weights, zoo_folders

if TYPE_CHECKING:
    from spec_lab.drafters.block import BlockPass
    from spec_lab.options.drafters.block_loading import PassMaker
    from spec_lab.wiring.drafting import DrafterFactory, DrafterResources
    from spec_lab.wiring.models import DrafterBuild

WEIGHTS = DrafterWeights(zoo_folders("p_eagle"))


@dataclass
class PEagleDrafterConfig(TrainedDrafterConfig):
    """drafter=p_eagle: an EAGLE-3 head whose catch-up step makes all drafts."""

    name: str = "p_eagle"
    weights: Weights = knob(Weights.checkpoint, "where the head's weights come from")
    num_layers: int | None = knob(None, "layers of a head of random weights; null is 2", least=1, most=64)


def weights_or_random(config: RunConfig) -> str | None:
    """The number of layers is only set for random weights, and a path only for a checkpoint, which has its own
    number."""
    options: Any = config.drafter
    if options.weights == Weights.random:
        return path_beside_random_weights(options)
    if options.num_layers is None:
        return WEIGHTS.missing(config)
    return f"drafter.num_layers={options.num_layers} is read only with drafter.weights=random; leave it out"


def load(chosen: Chosen, options: PEagleDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Read the head, or make one with random weights; the factory then makes a drafter with it for each engine."""
    from spec_lab.drafters.block import BlockDrafter
    from spec_lab.wiring.drafting import make_picker

    _, make_pass = _load_pass(chosen, options, build)
    return lambda resources: BlockDrafter(
        make_pass(resources), make_picker(chosen, options, build, resources), resources.span
    )


def load_tree(chosen: Chosen, options: PEagleDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same head, whose rows draft a tree."""
    from spec_lab.options.drafters.block_loading import tree_factory

    num_scored, make_pass = _load_pass(chosen, options, build)
    return tree_factory(chosen, build, make_pass, num_scored)


def _load_pass(chosen: Chosen, options: PEagleDrafterConfig, build: DrafterBuild) -> tuple[int, PassMaker]:
    """Return how many tokens the head scores, and a function that makes its pass for each engine."""
    from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
    from spec_lab.checkpoints.eagle3_config import default_tap_layer_inputs
    from spec_lab.checkpoints.random_weights import random_p_eagle
    from spec_lab.core.types import FeatureSpec
    from spec_lab.drafters.p_eagle import PEaglePass
    from spec_lab.models.p_eagle import PEagleHead
    from spec_lab.wiring.caches import build_cache

    target = build.target
    if options.weights == Weights.random:
        config, tensors = random_p_eagle(
            target.config, options.num_layers or 2, build.dtype, build.device, chosen.config.seed + 1
        )
    else:
        config, tensors = load_eagle3(chosen.drafter_folder, target.config, build.dtype, build.device, "peagle")
    head = build.beside_target(PEagleHead, config, tensors)
    features = FeatureSpec(layer_inputs=config.tap_layer_inputs or default_tap_layer_inputs(target.config.num_layers))
    plans = (*config.layer.layers, *config.more_layers)

    def make(resources: DrafterResources) -> BlockPass:
        cache = build_cache(plans, resources.limits, build)
        return PEaglePass(options.num_draft_tokens, head, features, cache, build.backend, resources.prune)

    return config.draft_vocab_size, make


ROW = DrafterOption(
    name="p_eagle",
    schema=PEagleDrafterConfig,
    load=load,
    refusals=(weights_or_random, steps_are_replayed),
    folder=WEIGHTS.folder,
    load_tree=load_tree,
    no_branch_keys=True,
    no_moves="drafts a block in one pass",
    notes_confidence=True,
    ingests_in_graphs=True,
)
