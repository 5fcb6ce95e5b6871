"""The keys and weights of drafters with MTP modules, and the functions that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.config import MTP_COUNT_KEYS, read_num_mtp_modules
from spec_lab.core.errors import UserError
from spec_lab.menu.choices import Choice, Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import DrafterConfig, RunConfig, TrainedDrafterConfig, knob
from spec_lab.options.shipped import (
    DrafterWeights,
    missing_folder,
    missing_shipped,
    no_weights_shipped,
    path_beside_random_weights,
)

if TYPE_CHECKING:
    import torch

    from spec_lab.checkpoints.mtp_checkpoint import MtpConfig
    from spec_lab.core.types import NormSide
    from spec_lab.models.mtp import MtpModule
    from spec_lab.wiring.models import DrafterBuild


class NormChoice(Choice):
    """The side of a final norm on which a hidden state is taken."""

    auto = "auto", "as the engines do for this family"
    pre_norm = "pre_norm"
    post_norm = "post_norm"


@dataclass
class MtpDrafterConfig(TrainedDrafterConfig):
    """Multi-token prediction modules, as DeepSeek, GLM, MiMo and Qwen ship them."""

    target_hidden: NormChoice = knob(NormChoice.auto, "which hidden state of the target the module reads")
    recycled_hidden: NormChoice = knob(NormChoice.auto, "which hidden state of the module the next draft reads")
    weights: Weights = knob(Weights.checkpoint, "where the modules' weights come from")


@dataclass(frozen=True, slots=True)
class MtpWeights(DrafterWeights):
    """The weights, which may also be in the target's checkpoint."""

    def folder_of_modules(self, config: RunConfig, options: MtpDrafterConfig) -> Path:
        """Return `drafter.path`, else `target.path`, else the folder of the weights shipped for the target.

        Raises:
            UserError: `target.path` has no modules, or neither path is set and nothing is shipped.
        """
        if options.path is None and config.target.path is not None:
            folder = Path(config.target.path)
            if read_num_mtp_modules(folder):
                return folder
            raise UserError(_none_found(config, options))
        return self.folder(config, options)

    def one_is_missing(self, config: RunConfig) -> str | None:
        """A checkpoint must have a module, according to its config.json."""
        return self._too_few_modules(config, 1)

    def one_a_draft_is_missing(self, config: RunConfig) -> str | None:
        """A checkpoint must have as many modules as drafts, according to its config.json."""
        return self._too_few_modules(config, config.drafter.num_draft_tokens)

    def _too_few_modules(self, config: RunConfig, num_needed: int) -> str | None:
        options: Any = config.drafter
        if options.weights == Weights.random:
            return path_beside_random_weights(options)
        name, folder = self._where_modules_lie(config)
        if folder is None or (name == "target.path" and folder.is_file()):
            return no_weights_shipped(options, config.target)
        if name == "shipped" and (missing := missing_shipped(options, folder)) is not None:
            return missing
        if not folder.is_dir():
            return missing_folder(name, str(folder)) if name == "drafter.path" else None  # others are checked elsewhere
        if not (folder / "config.json").is_file():
            return f"{name}={folder} has no config.json; give the folder of a checkpoint"
        num_modules = read_num_mtp_modules(folder)
        if num_modules >= num_needed:
            return None
        if num_modules:
            there_are = f"{num_modules} are shipped" if name == "shipped" else f"{name}={folder} has {num_modules}"
            return _use_fewer(options, num_modules, there_are)
        if name == "target.path":
            return _none_found(config, options)
        return (
            f"{name}={folder} names no MTP modules in its config.json ({' or '.join(MTP_COUNT_KEYS)}); give the folder "
            "of a checkpoint that has MTP modules"
        )

    def _where_modules_lie(self, config: RunConfig) -> tuple[str, Path | None]:
        """Return the knob that names the folder of the modules, or `shipped`, and then the folder."""
        options: Any = config.drafter
        if options.path is not None:
            return "drafter.path", Path(options.path)
        if config.target.path is not None:
            return "target.path", Path(config.target.path)
        return "shipped", self.shipped_for(config.target)


def _none_found(config: RunConfig, options: DrafterConfig) -> str:
    searched = f", and the config.json of target.path={config.target.path} names no MTP modules"
    return no_weights_shipped(options, config.target, searched)


def _use_fewer(options: DrafterConfig, num_modules: int, there_are: str) -> str:
    return (
        f"drafter.num_draft_tokens={options.num_draft_tokens}: drafter={options.name} has a module for each draft, but "
        f"{there_are}; use drafter.num_draft_tokens={num_modules} or drafter=mtp_eagle"
    )


def read_mtp_modules(
    chosen: Chosen, options: MtpDrafterConfig, build: DrafterBuild, num_modules: int
) -> tuple[MtpConfig, list[dict[str, torch.Tensor]]]:
    """Read the first `num_modules` modules in the drafter's folder, or make them with random weights. In their
    config, the knobs `target_hidden` and `recycled_hidden` apply unless they are `auto`."""
    from spec_lab.checkpoints.mtp_checkpoint import load_mtp
    from spec_lab.checkpoints.random_weights import random_mtp

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
    """Make a module from each of `tensors`; all share the target's embedding and head."""
    from spec_lab.models.linear import make_linear
    from spec_lab.models.mtp import MtpModule
    from spec_lab.models.rope import rotary_table

    target = build.target
    head = make_linear(target.head_weight)
    plan = mtp.layer.only_layer
    rotary = rotary_table(plan.rope, plan.head_dim, target.num_positions, build.dtype, build.device)
    modules = [
        MtpModule(mtp, of_module, target.embedding, head, rotary, build.backend, build.kernels.products)
        for of_module in tensors
    ]
    for module in modules:
        build.adopt(module.expert_parts)
    return modules


def _norm_side(value: NormChoice, default: NormSide) -> NormSide:
    from spec_lab.core.types import NormSide

    return default if value == NormChoice.auto else NormSide(str(value))
