"""This module loads drafter=mtp_eagle, and the modules of drafter=mtp_vanilla, which are loaded alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from spec_lab.assembly.caches import build_cache
from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.drafters.mtp import MtpDrafterConfig, MtpEagleDrafterConfig, NormChoice
from spec_lab.assembly.heads import DrafterFactory, DrafterResources, make_picker
from spec_lab.assembly.models import DrafterBuild
from spec_lab.assembly.trees_loader import build_siblings, build_tree_shape, tree_backend
from spec_lab.checkpoints.mtp_checkpoint import MtpConfig, load_mtp
from spec_lab.checkpoints.random_weights import random_mtp
from spec_lab.config import Weights
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import FeatureSpec, NormSide
from spec_lab.drafters.recurrent import RecurrentDrafter
from spec_lab.drafters.recurrent_tree import RecurrentTreeDrafter
from spec_lab.models.linear import make_linear
from spec_lab.models.mtp import MtpModule
from spec_lab.models.rope import rotary_table


def load_mtp_eagle_drafter(chosen: Chosen, options: MtpEagleDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load one module, reused for every draft (TensorRT-LLM's MTP-Eagle, SGLang's NextN)."""
    mtp, tensors = read_mtp_modules(chosen, options, build, 1)
    return mtp_eagle_factory(chosen, options, build, mtp, tensors)


def load_mtp_eagle_tree_drafter(chosen: Chosen, options: MtpEagleDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same module, which drafts the branches of a tree."""
    mtp, tensors = read_mtp_modules(chosen, options, build, 1)
    (module,) = build_mtp_modules(mtp, tensors, build)
    shape = build_tree_shape(chosen, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(mtp.layer.layers, resources.limits, build).layers[0]
        features = FeatureSpec(final_hidden=mtp.target_hidden)
        siblings = build_siblings(chosen, build, resources, shape)
        return RecurrentTreeDrafter(shape, siblings, module, features, cache, tree_backend(build), resources.prune)

    return make


def mtp_eagle_factory(
    chosen: Chosen,
    options: MtpEagleDrafterConfig,
    build: DrafterBuild,
    mtp: MtpConfig,
    tensors: Sequence[Mapping[str, torch.Tensor]],
) -> DrafterFactory:
    """Make drafters around a module that was read already."""
    (module,) = build_mtp_modules(mtp, tensors, build)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(mtp.layer.layers, resources.limits, build).layers[0]
        picker = make_picker(chosen, options, build, resources)
        features = FeatureSpec(final_hidden=mtp.target_hidden)
        parts = build.backend, resources.prune, picker, build.kernels.plan_catchup
        return RecurrentDrafter(options.num_draft_tokens, module, features, cache, *parts)

    return make


def read_mtp_modules(
    chosen: Chosen, options: MtpDrafterConfig, build: DrafterBuild, num_modules: int
) -> tuple[MtpConfig, list[dict[str, torch.Tensor]]]:
    """Read the first modules of the drafter's folder, or as many of random weights; their config has the sides of the
    norms that the knobs settled."""
    target = build.target.config
    if options.weights == Weights.random:
        mtp, tensors = random_mtp(target, num_modules, build.dtype, build.device, chosen.config.seed + 1)
    else:
        mtp, tensors = load_mtp(chosen.drafter_folder, target, num_modules, build.dtype, build.device)
    mtp = replace(
        mtp,
        target_hidden=_norm_side(options.target_hidden, mtp.target_hidden),
        recycled_hidden=_norm_side(options.recycled_hidden, mtp.recycled_hidden),
    )
    return mtp, tensors


def build_mtp_modules(
    mtp: MtpConfig, tensors: Sequence[Mapping[str, torch.Tensor]], build: DrafterBuild
) -> list[MtpModule]:
    """Make a module around each of `tensors`; they share the target's embedding and head."""
    target = build.target
    head = make_linear(target.head_weight)
    plan = mtp.layer.only_layer
    rotary = rotary_table(plan.rope, plan.head_dim, target.num_positions, build.dtype, build.device)
    shared = target.embedding, head, rotary, build.backend, build.kernels.products
    modules = [MtpModule(mtp, of_module, *shared) for of_module in tensors]
    for module in modules:
        build.adopt(module.expert_parts)
    return modules


def _norm_side(value: NormChoice, default: NormSide) -> NormSide:
    return default if value == NormChoice.auto else NormSide(str(value))
