"""drafter=eagle3: its keys, refusals and loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError
from spec_lab.menu.choices import Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig, TrainedDrafterConfig, knob
from spec_lab.menu.option import DrafterOption
from spec_lab.menu.readings import Aspect
from spec_lab.options.shipped import DrafterWeights, path_beside_random_weights, zoo_folders

if TYPE_CHECKING:
    import torch

    from spec_lab.checkpoints.eagle3_config import Eagle3Config
    from spec_lab.core.protocols import Drafter
    from spec_lab.core.types import FeatureSpec
    from spec_lab.models.eagle3 import Eagle3Head
    from spec_lab.wiring.drafting import DrafterFactory, DrafterResources
    from spec_lab.wiring.models import DrafterBuild


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
    """The window includes at least the row itself."""
    options: Any = config.drafter
    if options.window is None or options.window >= 1:
        return None
    return (
        f"drafter.window={options.window} hides a row from itself; use drafter.window=1 or more, or "
        "drafter.window=null for all keys"
    )


def weights_or_random(config: RunConfig) -> str | None:
    """The draft vocabulary size is only set for random weights, and a path only for a checkpoint, which has its own
    size."""
    options: Any = config.drafter
    if options.weights == Weights.checkpoint:
        if options.draft_vocab_size is None:
            return WEIGHTS.missing(config)
        size = options.draft_vocab_size
        return f"drafter.draft_vocab_size={size} is read only with drafter.weights=random; leave it out"
    return path_beside_random_weights(options)


def load(chosen: Chosen, options: Eagle3DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Read the head, or make one with random weights; the factory then makes a drafter with it for each engine."""
    head_config, tensors = read_eagle3(chosen, options, build)
    return eagle3_factory(chosen, options, build, head_config, tensors)


def load_tree(chosen: Chosen, options: Eagle3DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same head, which drafts the branches of a tree."""
    from spec_lab.drafters.recurrent import RecurrentTreeDrafter
    from spec_lab.wiring.caches import build_cache
    from spec_lab.wiring.drafting import (
        build_siblings,
        build_tree_shape,
        refuse_few_tokens,
        shape_of_engine,
        tree_backend,
    )

    head_config, tensors = read_eagle3(chosen, options, build)
    head, features = _head(options, build, head_config, tensors)
    shape = build_tree_shape(chosen, build)
    refuse_few_tokens(shape.topk, head_config.draft_vocab_size)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(head_config.layer.layers, resources.limits, build).layers[0]
        siblings = build_siblings(chosen, build, resources, shape)
        grown = shape_of_engine(chosen, shape, resources)
        return RecurrentTreeDrafter(grown, siblings, head, features, cache, tree_backend(build), resources.prune)

    return make


def read_eagle3(
    chosen: Chosen, options: Eagle3DrafterConfig, build: DrafterBuild
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Read the head's config and tensors, or make random ones; UserError if they do not fit the target."""
    from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
    from spec_lab.checkpoints.random_weights import random_eagle3

    target = build.target.config
    if options.weights == Weights.random:
        size = options.draft_vocab_size
        if size is not None and size > target.vocab_size:
            raise UserError(
                f"drafter.draft_vocab_size={size} is more than the {target.vocab_size} tokens of the target; "
                "use drafter.draft_vocab_size=null for all of them"
            )
        return random_eagle3(target, size, build.dtype, build.device, chosen.config.seed + 1)
    return load_eagle3(chosen.drafter_folder, target, build.dtype, build.device)


def eagle3_factory(
    chosen: Chosen,
    options: Eagle3DrafterConfig,
    build: DrafterBuild,
    head_config: Eagle3Config,
    tensors: Mapping[str, torch.Tensor],
) -> DrafterFactory:
    """Make drafters with a head that has already been read."""
    from spec_lab.drafters.recurrent import RecurrentDrafter
    from spec_lab.wiring.caches import attention_kinds, build_cache
    from spec_lab.wiring.drafting import make_picker

    head, features = _head(options, build, head_config, tensors)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(head_config.layer.layers, resources.limits, build).layers[0]
        picker = make_picker(chosen, options, build, resources)
        return RecurrentDrafter(
            options.num_draft_tokens,
            head,
            features,
            cache,
            build.backend,
            resources.prune,
            picker,
            build.kernels,
            attention_kinds([replace(head_config.layer.only_layer, window=options.window)]),
        )

    return make


def _head(
    options: Eagle3DrafterConfig, build: DrafterBuild, head_config: Eagle3Config, tensors: Mapping[str, torch.Tensor]
) -> tuple[Eagle3Head, FeatureSpec]:
    """Make the head; also return which of the target's hidden states it reads."""
    from spec_lab.checkpoints.eagle3_config import default_tap_layer_inputs
    from spec_lab.core.types import FeatureSpec
    from spec_lab.models.eagle3 import Eagle3Head

    taps = head_config.tap_layer_inputs or default_tap_layer_inputs(build.target.config.num_layers)
    head = build.beside_target(partial(Eagle3Head, window=options.window), head_config, tensors)
    return head, FeatureSpec(layer_inputs=taps)


def aspects(chosen: Chosen, options: Eagle3DrafterConfig, build: DrafterBuild) -> list[Aspect]:
    """List the choices in reading the head, with the alternatives."""
    from spec_lab.options.drafters.aspects import eagle3_aspects

    head, tensors = read_eagle3(chosen, options, build)

    def factory(
        head: Eagle3Config, tensors: Mapping[str, torch.Tensor], window: int | None = options.window
    ) -> DrafterFactory:
        return eagle3_factory(chosen, replace(options, window=window), build, head, tensors)

    return eagle3_aspects(head, tensors, options.window, build.target.config.num_layers, factory)


ROW = DrafterOption(
    name="eagle3",
    schema=Eagle3DrafterConfig,
    load=load,
    refusals=(weights_or_random, window_shows_a_row),
    folder=WEIGHTS.folder,
    aspects=aspects,
    hands_hidden_on=True,
    load_tree=load_tree,
    notes_confidence=True,
    ingests_in_graphs=True,
)
