"""drafter=frozen_kv: its keys, refusals and loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.menu.choices import Choice, Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig, TrainedDrafterConfig, knob
from spec_lab.menu.option import DrafterOption
from spec_lab.menu.readings import Aspect
from spec_lab.options.shipped import DrafterWeights, zoo_folders
from spec_lab.options.targets import SHAPES

if TYPE_CHECKING:
    import torch

    from spec_lab.checkpoints.gemma4_assistant_config import AssistantConfig
    from spec_lab.core.kv_cache import LayerCache
    from spec_lab.core.protocols import Drafter
    from spec_lab.drafters.frozen_kv import Anchor
    from spec_lab.models.gemma4_assistant import Gemma4Assistant
    from spec_lab.wiring.drafting import DrafterFactory, DrafterResources
    from spec_lab.wiring.models import DrafterBuild


ASSISTANT_SHAPES = {name: SHAPES / f"{name}_assistant" for name in ("gemma4_31b", "gemma4_e4b")}
"""The folder with an assistant's config.json, by the target that it is for. These targets have only a shape (a
config.json without weights)."""


@dataclass(frozen=True, slots=True)
class AssistantWeights(DrafterWeights):
    """The weights, which may be random. An assistant's sizes do not follow from its target's, so they are read from a
    config.json."""

    def folder_of_config(self, config: RunConfig, options: Any) -> Path:
        """Return the assistant's folder; with random weights only its config.json is read."""
        if options.weights == Weights.random and options.path is None:
            return ASSISTANT_SHAPES[config.target.name]
        return self.folder(config, options)

    def missing_or_unknown(self, config: RunConfig) -> str | None:
        """There must be weights, or sizes for random ones."""
        options: Any = config.drafter
        if options.weights != Weights.random or options.path is not None:
            return self.missing(config)
        if config.target.name in ASSISTANT_SHAPES:
            return None
        return (
            f"drafter.weights=random: the sizes of an assistant of target={config.target.name} are not known; use "
            f"target={' or '.join(ASSISTANT_SHAPES)} with target.weights=random, or drafter.path=FOLDER with "
            "a config.json"
        )


WEIGHTS = AssistantWeights(zoo_folders("frozen_kv"))


class FrozenKvPosition(Choice):
    """The position that every draft step of a frozen-KV drafter uses."""

    last = "last", "SGLang, vLLM"
    bonus = "bonus", "transformers, with sliding windows that are a key wider"


@dataclass
class FrozenKvDrafterConfig(TrainedDrafterConfig):
    """drafter=frozen_kv: queries only, over the target's KV (the Gemma 4 assistant)."""

    name: str = "frozen_kv"
    position: FrozenKvPosition = knob(FrozenKvPosition.last, "position of the query in every draft step")
    weights: Weights = knob(
        Weights.checkpoint, "where the assistant's weights come from; its sizes come from a config.json"
    )


def load(chosen: Chosen, options: FrozenKvDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load a head that reads its target's KV and writes none (Gemma 4's assistants)."""
    assistant, tensors = read_assistant(chosen, options, build)
    return frozen_kv_factory(chosen, options, build, assistant, tensors)


def load_tree(chosen: Chosen, options: FrozenKvDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same head, which drafts the branches of a tree."""
    from spec_lab.drafters.frozen_kv import ANCHORS
    from spec_lab.drafters.frozen_kv_tree import FrozenKVTreeDrafter
    from spec_lab.wiring.drafting import build_siblings, build_tree_shape, shape_of_engine

    assistant, tensors = read_assistant(chosen, options, build)
    anchor = ANCHORS[options.position]
    head = _head(build, assistant, tensors, anchor)
    shape = build_tree_shape(chosen, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        siblings = build_siblings(chosen, build, resources, shape)
        grown = shape_of_engine(chosen, shape, resources)
        return FrozenKVTreeDrafter(grown, siblings, head, _caches(assistant, resources), build.backend, anchor)

    return make


def read_assistant(
    chosen: Chosen, options: FrozenKvDrafterConfig, build: DrafterBuild
) -> tuple[AssistantConfig, dict[str, torch.Tensor]]:
    """Read the assistant from the drafter's folder, or make one with random weights of its sizes."""
    from spec_lab.checkpoints.gemma4_assistant_checkpoint import load_assistant
    from spec_lab.checkpoints.gemma4_assistant_config import AssistantTarget, read_assistant_config
    from spec_lab.checkpoints.random_weights import random_assistant

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
    """Make drafters with an assistant that has already been read."""
    from spec_lab.drafters.frozen_kv import ANCHORS, FrozenKVDrafter
    from spec_lab.wiring.drafting import make_picker

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
    from spec_lab.models.gemma4_assistant import Gemma4Assistant
    from spec_lab.models.partition import WHOLE
    from spec_lab.models.products import PLAIN

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
    """Return, for each layer of the head, the cache of the target layer that it reads."""
    return [resources.target_cache.layers[layer.kv_source] for layer in assistant.layers]


def aspects(chosen: Chosen, options: FrozenKvDrafterConfig, build: DrafterBuild) -> list[Aspect]:
    """List the choices in reading the assistant, with the alternatives."""
    from spec_lab.options.drafters.aspects import frozen_kv_aspects

    assistant, tensors = read_assistant(chosen, options, build)

    def factory(
        assistant: AssistantConfig,
        tensors: Mapping[str, torch.Tensor],
        position: FrozenKvPosition = options.position,
    ) -> DrafterFactory:
        return frozen_kv_factory(chosen, replace(options, position=position), build, assistant, tensors)

    others = [position for position in FrozenKvPosition if position != options.position]
    return frozen_kv_aspects(assistant, tensors, options.position, others, factory)


ROW = DrafterOption(
    name="frozen_kv",
    schema=FrozenKvDrafterConfig,
    load=load,
    refusals=(WEIGHTS.missing_or_unknown,),
    folder=WEIGHTS.folder_of_config,
    aspects=aspects,
    hands_hidden_on=True,
    load_tree=load_tree,
    no_branch_keys=True,
    no_moves="stands at one position in all its steps",
    notes_confidence=True,
    ingests_in_graphs=True,
)
