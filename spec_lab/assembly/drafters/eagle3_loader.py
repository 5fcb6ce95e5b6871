"""This module loads drafter=eagle3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spec_lab.assembly.caches import build_cache
from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.drafters.eagle3 import Eagle3DrafterConfig
from spec_lab.assembly.heads import DrafterFactory, DrafterResources, make_picker
from spec_lab.assembly.models import DrafterBuild
from spec_lab.assembly.trees_loader import build_siblings, build_tree_shape, refuse_few_tokens, tree_backend
from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
from spec_lab.checkpoints.eagle3_config import Eagle3Config, default_tap_layer_inputs
from spec_lab.checkpoints.random_weights import random_eagle3
from spec_lab.config import Weights
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import FeatureSpec
from spec_lab.drafters.recurrent import RecurrentDrafter
from spec_lab.drafters.recurrent_tree import RecurrentTreeDrafter
from spec_lab.errors import UserError
from spec_lab.models.eagle3 import Eagle3Head


def load_eagle3_drafter(chosen: Chosen, options: Eagle3DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Read the head, or make one of random weights; the factory then makes one drafter an engine around it."""
    head_config, tensors = read_eagle3(chosen, options, build)
    return eagle3_factory(chosen, options, build, head_config, tensors)


def load_eagle3_tree_drafter(chosen: Chosen, options: Eagle3DrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same head, which drafts the branches of a tree."""
    head_config, tensors = read_eagle3(chosen, options, build)
    head, features = _head(options, build, head_config, tensors)
    shape = build_tree_shape(chosen, build)
    refuse_few_tokens(shape.topk, head_config.draft_vocab_size)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(head_config.layer.layers, resources.limits, build).layers[0]
        siblings = build_siblings(chosen, build, resources, shape)
        return RecurrentTreeDrafter(shape, siblings, head, features, cache, tree_backend(build), resources.prune)

    return make


def read_eagle3(
    chosen: Chosen, options: Eagle3DrafterConfig, build: DrafterBuild
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Read the head's config and tensors; UserError where it does not belong to the target."""
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
    """Make drafters around a head that was read already."""
    head, features = _head(options, build, head_config, tensors)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(head_config.layer.layers, resources.limits, build).layers[0]
        picker = make_picker(chosen, options, build, resources)
        parts = build.backend, resources.prune, picker, build.kernels.plan_catchup
        return RecurrentDrafter(options.num_draft_tokens, head, features, cache, *parts)

    return make


def _head(
    options: Eagle3DrafterConfig, build: DrafterBuild, head_config: Eagle3Config, tensors: Mapping[str, torch.Tensor]
) -> tuple[Eagle3Head, FeatureSpec]:
    """Makes the head, and says what it reads of the target."""
    target = build.target
    taps = head_config.tap_layer_inputs or default_tap_layer_inputs(target.config.num_layers)
    head = Eagle3Head(
        head_config,
        tensors,
        target.embedding,
        target.head_weight,
        build.backend,
        target.num_positions,
        options.window,
        build.kernels.products,
    )
    return head, FeatureSpec(layer_inputs=taps)
