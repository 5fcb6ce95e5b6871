"""drafter=mtp_vanilla: its keys, refusals and loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_lab.menu.choices import Choice
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import knob
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


class ModuleRows(Choice):
    """The rows over which a module of vanilla MTP runs after a round."""

    text = "text", "K + 1 and the drafts before it: its cache holds every pair of the text"
    window = "window", "K, as TensorRT-LLM: its cache has holes and pairs of drafts"


@dataclass
class MtpVanillaDrafterConfig(MtpDrafterConfig):
    """drafter=mtp_vanilla: an MTP module for each draft, over a window of the last tokens."""

    name: str = "mtp_vanilla"
    rows: ModuleRows = knob(ModuleRows.text, "the rows of each module after a round")


VANILLA_WEIGHTS = MtpWeights(zoo_folders("mtp_vanilla"))


def load(chosen: Chosen, options: MtpVanillaDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load a module for each draft (TensorRT-LLM's MTP vanilla); UserError if the checkpoint has fewer modules."""
    mtp, tensors = read_mtp_modules(chosen, options, build, options.num_draft_tokens)
    return mtp_vanilla_factory(chosen, options, build, mtp, tensors)


def mtp_vanilla_factory(
    chosen: Chosen,
    options: MtpVanillaDrafterConfig,
    build: DrafterBuild,
    mtp: MtpConfig,
    tensors: Sequence[Mapping[str, torch.Tensor]],
) -> DrafterFactory:
    """Make drafters with modules that have already been read, one for each draft."""
    from spec_lab.core.types import FeatureSpec
    from spec_lab.drafters.mtp_vanilla import MtpVanillaDrafter
    from spec_lab.drafters.mtp_window import MtpWindow
    from spec_lab.wiring.caches import build_cache
    from spec_lab.wiring.drafting import make_picker

    modules = build_mtp_modules(mtp, tensors, build)
    num_modules = len(modules)

    def make(resources: DrafterResources) -> Drafter[Any]:
        limits = resources.limits
        caches = build_cache(mtp.layer.layers * num_modules, limits, build).layers
        window = MtpWindow(
            limits.num_slots, num_modules, mtp.layer.hidden_size, build.dtype, build.device, build.kernels
        )
        picker = make_picker(chosen, options, build, resources)
        features = FeatureSpec(final_hidden=mtp.target_hidden)
        only_window = options.rows == ModuleRows.window
        return MtpVanillaDrafter(modules, caches, window, features, build.backend, resources.prune, picker, only_window)

    return make


def aspects(chosen: Chosen, options: MtpVanillaDrafterConfig, build: DrafterBuild) -> list[Aspect]:
    """List the choices in reading the modules: their order, and the choices of any MTP drafter, which apply to all
    modules alike."""
    from spec_lab.options.drafters.aspects import mtp_aspects, order_aspect

    mtp, modules = read_mtp_modules(chosen, options, build, options.num_draft_tokens)
    factory = partial(mtp_vanilla_factory, chosen, options, build)
    return [*mtp_aspects(mtp, modules, factory), order_aspect(mtp, modules, factory)]


ROW = DrafterOption(
    name="mtp_vanilla",
    schema=MtpVanillaDrafterConfig,
    load=load,
    refusals=(VANILLA_WEIGHTS.one_a_draft_is_missing,),
    folder=VANILLA_WEIGHTS.folder_of_modules,
    aspects=aspects,
    hands_hidden_on=True,
    no_moves="ends the rows of every module at the same position",
    notes_confidence=True,
)
