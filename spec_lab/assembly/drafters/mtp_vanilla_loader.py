"""This module loads drafter=mtp_vanilla."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spec_lab.assembly.caches import build_cache
from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.drafters.mtp import MtpVanillaDrafterConfig
from spec_lab.assembly.drafters.mtp_loader import build_mtp_modules, read_mtp_modules
from spec_lab.assembly.heads import DrafterFactory, DrafterResources, make_picker
from spec_lab.assembly.models import DrafterBuild
from spec_lab.checkpoints.mtp_checkpoint import MtpConfig
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import FeatureSpec
from spec_lab.drafters.mtp_vanilla import MtpVanillaDrafter


def load_mtp_vanilla_drafter(chosen: Chosen, options: MtpVanillaDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load a module for each draft (TensorRT-LLM's MTP vanilla); UserError when the checkpoint has fewer modules."""
    mtp, tensors = read_mtp_modules(chosen, options, build, options.num_draft_tokens)
    return mtp_vanilla_factory(chosen, options, build, mtp, tensors)


def mtp_vanilla_factory(
    chosen: Chosen,
    options: MtpVanillaDrafterConfig,
    build: DrafterBuild,
    mtp: MtpConfig,
    tensors: Sequence[Mapping[str, torch.Tensor]],
) -> DrafterFactory:
    """Make drafters around modules that were read already, one for each draft."""
    modules = build_mtp_modules(mtp, tensors, build)
    num_modules = len(modules)

    def make(resources: DrafterResources) -> Drafter[Any]:
        limits = resources.limits
        caches = build_cache(mtp.layer.layers * num_modules, limits, build).layers
        window = build.kernels.mtp_window(
            limits.num_slots, num_modules, mtp.layer.hidden_size, build.dtype, build.device
        )
        picker = make_picker(chosen, options, build, resources)
        features = FeatureSpec(final_hidden=mtp.target_hidden)
        return MtpVanillaDrafter(modules, caches, window, features, build.backend, resources.prune, picker)

    return make
