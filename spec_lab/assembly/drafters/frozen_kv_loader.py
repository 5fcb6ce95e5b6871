"""This module loads drafter=frozen_kv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.drafters.frozen_kv import FrozenKvDrafterConfig
from spec_lab.assembly.heads import DrafterFactory, DrafterResources, make_picker
from spec_lab.assembly.models import DrafterBuild
from spec_lab.assembly.trees_loader import build_siblings, build_tree_shape
from spec_lab.checkpoints.gemma4_assistant_checkpoint import load_assistant
from spec_lab.checkpoints.gemma4_assistant_config import AssistantConfig, AssistantTarget, read_assistant_config
from spec_lab.checkpoints.random_weights import random_assistant
from spec_lab.config import Weights
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.protocols import Drafter
from spec_lab.drafters.frozen_kv import ANCHORS, Anchor, FrozenKVDrafter
from spec_lab.drafters.frozen_kv_tree import FrozenKVTreeDrafter
from spec_lab.models.gemma4_assistant import Gemma4Assistant
from spec_lab.models.partition import WHOLE
from spec_lab.models.products import PLAIN


def load_frozen_kv_drafter(chosen: Chosen, options: FrozenKvDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load a head that reads its target's KV, and writes none (Gemma 4's assistants)."""
    assistant, tensors = read_assistant(chosen, options, build)
    return frozen_kv_factory(chosen, options, build, assistant, tensors)


def load_frozen_kv_tree_drafter(chosen: Chosen, options: FrozenKvDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same head, which drafts the branches of a tree."""
    assistant, tensors = read_assistant(chosen, options, build)
    anchor = ANCHORS[options.position]
    head = _head(build, assistant, tensors, anchor)
    shape = build_tree_shape(chosen, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        siblings = build_siblings(chosen, build, resources, shape)
        return FrozenKVTreeDrafter(shape, siblings, head, _caches(assistant, resources), build.backend, anchor)

    return make


def read_assistant(
    chosen: Chosen, options: FrozenKvDrafterConfig, build: DrafterBuild
) -> tuple[AssistantConfig, dict[str, torch.Tensor]]:
    """Read the assistant of the drafter's folder, or make one of random weights with its sizes."""
    folder, target = chosen.drafter_folder, AssistantTarget.from_model_config(build.target.config)
    if options.weights == Weights.random:
        assistant = read_assistant_config(folder, target)
        return assistant, random_assistant(assistant, build.dtype, build.device, chosen.config.seed + 1)
    return load_assistant(folder, target, build.dtype, build.device)


def frozen_kv_factory(
    chosen: Chosen,
    options: FrozenKvDrafterConfig,
    build: DrafterBuild,
    assistant: AssistantConfig,
    tensors: Mapping[str, torch.Tensor],
) -> DrafterFactory:
    """Make drafters around an assistant that was read already."""
    anchor = ANCHORS[options.position]
    head = _head(build, assistant, tensors, anchor)

    def make(resources: DrafterResources) -> Drafter[Any]:
        caches = _caches(assistant, resources)
        picker = make_picker(chosen, options, build, resources)
        return FrozenKVDrafter(options.num_draft_tokens, head, caches, build.backend, picker, anchor)

    return make


def _head(
    build: DrafterBuild, assistant: AssistantConfig, tensors: Mapping[str, torch.Tensor], anchor: Anchor
) -> Gemma4Assistant:
    target = build.target
    return Gemma4Assistant(
        assistant,
        tensors,
        target.embedding,
        build.backend,
        target.num_positions,
        anchor.extra_window_keys,
        target.partition,
        build.kernels.products if target.partition is WHOLE else PLAIN,
    )


def _caches(assistant: AssistantConfig, resources: DrafterResources) -> list[LayerCache]:
    """Find for each layer of the head the layer of the target that it reads."""
    return [resources.target_cache.layers[layer.kv_source] for layer in assistant.layers]
