"""drafter=mtp_eagle: its keys, refusals and loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.option import DrafterOption
from spec_lab.menu.readings import Aspect
from spec_lab.options.drafters.mtp import MtpDrafterConfig, MtpWeights, build_mtp_modules, read_mtp_modules
from spec_lab.options.shipped import zoo_folders

if TYPE_CHECKING:
    import torch

    from spec_lab.checkpoints.mtp_checkpoint import MtpConfig
    from spec_lab.core.protocols import Drafter
    from spec_lab.wiring.drafting import DrafterFactory, DrafterResources
    from spec_lab.wiring.models import DrafterBuild


@dataclass
class MtpEagleDrafterConfig(MtpDrafterConfig):
    """drafter=mtp_eagle: one MTP module, reused for every draft."""

    name: str = "mtp_eagle"


EAGLE_WEIGHTS = MtpWeights(zoo_folders("mtp_eagle"))


def load(chosen: Chosen, options: MtpEagleDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load one module, reused for every draft (TensorRT-LLM's MTP-Eagle, SGLang's NextN)."""
    mtp, tensors = read_mtp_modules(chosen, options, build, 1)
    return mtp_eagle_factory(chosen, options, build, mtp, tensors)


def load_tree(chosen: Chosen, options: MtpEagleDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same module, which drafts the branches of a tree."""
    from spec_lab.core.types import FeatureSpec
    from spec_lab.drafters.recurrent import RecurrentTreeDrafter
    from spec_lab.wiring.caches import build_cache
    from spec_lab.wiring.drafting import build_siblings, build_tree_shape, shape_of_engine, tree_backend

    mtp, tensors = read_mtp_modules(chosen, options, build, 1)
    (module,) = build_mtp_modules(mtp, tensors, build)
    shape = build_tree_shape(chosen, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(mtp.layer.layers, resources.limits, build).layers[0]
        features = FeatureSpec(final_hidden=mtp.target_hidden)
        siblings = build_siblings(chosen, build, resources, shape)
        grown = shape_of_engine(chosen, shape, resources)
        return RecurrentTreeDrafter(grown, siblings, module, features, cache, tree_backend(build), resources.prune)

    return make


def mtp_eagle_factory(
    chosen: Chosen,
    options: MtpEagleDrafterConfig,
    build: DrafterBuild,
    mtp: MtpConfig,
    tensors: Sequence[Mapping[str, torch.Tensor]],
) -> DrafterFactory:
    """Make drafters with a module that has already been read."""
    from spec_lab.core.types import FeatureSpec
    from spec_lab.drafters.recurrent import RecurrentDrafter
    from spec_lab.wiring.caches import attention_kinds, build_cache
    from spec_lab.wiring.drafting import make_picker

    (module,) = build_mtp_modules(mtp, tensors, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(mtp.layer.layers, resources.limits, build).layers[0]
        picker = make_picker(chosen, options, build, resources)
        features = FeatureSpec(final_hidden=mtp.target_hidden)
        return RecurrentDrafter(
            options.num_draft_tokens,
            module,
            features,
            cache,
            build.backend,
            resources.prune,
            picker,
            build.kernels,
            attention_kinds(mtp.layer.layers),
        )

    return make


def aspects(chosen: Chosen, options: MtpEagleDrafterConfig, build: DrafterBuild) -> list[Aspect]:
    """List the choices in reading the module, which is used for every draft."""
    from spec_lab.options.drafters.aspects import mtp_aspects

    mtp, tensors = read_mtp_modules(chosen, options, build, 1)
    return mtp_aspects(mtp, tensors, partial(mtp_eagle_factory, chosen, options, build))


ROW = DrafterOption(
    name="mtp_eagle",
    schema=MtpEagleDrafterConfig,
    load=load,
    refusals=(EAGLE_WEIGHTS.one_is_missing,),
    folder=EAGLE_WEIGHTS.folder_of_modules,
    aspects=aspects,
    hands_hidden_on=True,
    load_tree=load_tree,
    notes_confidence=True,
    ingests_in_graphs=True,
)
