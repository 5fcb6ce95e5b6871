"""This module holds the rows of drafter=mtp_eagle and drafter=mtp_vanilla: their keys and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import (
    DrafterWeights,
    TrainedDrafterConfig,
    missing_folder,
    no_weights_shipped,
    path_beside_random_weights,
    zoo_folders,
)
from spec_lab.assembly.option import DrafterOption
from spec_lab.checkpoints.config import MTP_COUNT_KEYS, read_num_mtp_modules
from spec_lab.config import Choice, DrafterConfig, RunConfig, Weights, knob
from spec_lab.errors import UserError


class NormChoice(Choice):
    """The side of a final norm on which a hidden state is taken."""

    auto = "auto", "what the engines of the family do"
    pre_norm = "pre_norm"
    post_norm = "post_norm"


@dataclass
class MtpDrafterConfig(TrainedDrafterConfig):
    """Multi-token prediction modules, as DeepSeek, GLM, MiMo and Qwen ship them."""

    target_hidden: NormChoice = knob(NormChoice.auto, "the target's hidden state that goes in")
    recycled_hidden: NormChoice = knob(NormChoice.auto, "the module's own that goes on to the next draft")
    weights: Weights = knob(Weights.checkpoint, "where the modules' weights come from")


@dataclass
class MtpEagleDrafterConfig(MtpDrafterConfig):
    """drafter=mtp_eagle: one MTP module, reused for every draft."""

    name: str = "mtp_eagle"


@dataclass
class MtpVanillaDrafterConfig(MtpDrafterConfig):
    """drafter=mtp_vanilla: an MTP module for each draft, over a window of the last tokens."""

    name: str = "mtp_vanilla"


@dataclass(frozen=True, slots=True)
class MtpWeights(DrafterWeights):
    """Modules may also lie in the checkpoint of a target that brings its own."""

    def folder_of_modules(self, config: RunConfig, options: MtpDrafterConfig) -> Path:
        """Return `drafter.path`, the folder of a target that brings modules, or the weights shipped for the target."""
        if options.path is None and config.target.path is not None:
            folder = Path(config.target.path)
            if read_num_mtp_modules(folder, "target.path"):
                return folder
            raise UserError(_none_found(config, options))
        return self.folder(config, options)

    def one_is_missing(self, config: RunConfig) -> str | None:
        """There is a module, by config.json alone."""
        return self._too_few_modules(config, 1)

    def one_a_draft_is_missing(self, config: RunConfig) -> str | None:
        """There are as many modules as drafts, by config.json alone."""
        return self._too_few_modules(config, config.drafter.num_draft_tokens)

    def _too_few_modules(self, config: RunConfig, num_needed: int) -> str | None:
        options: Any = config.drafter
        if options.weights == Weights.random:
            return path_beside_random_weights(options)
        name, folder = self._where_modules_lie(config)
        if folder is None:
            return no_weights_shipped(options, config.target)
        if not folder.is_dir():
            return missing_folder(name, str(folder)) if name == "drafter.path" else None  # the target refuses its own
        try:
            num_modules = read_num_mtp_modules(folder, name)
        except UserError as error:
            return str(error)
        if num_modules >= num_needed:
            return None
        if num_modules:
            there_are = f"{num_modules} are shipped" if name == "shipped" else f"{name}={folder} has {num_modules}"
            return _use_fewer(options, num_modules, there_are)
        if name == "target.path":
            return _none_found(config, options)
        return (
            f"{name}={folder} names no MTP modules in its config.json ({' or '.join(MTP_COUNT_KEYS)}); "
            "give the folder of a checkpoint that has some"
        )

    def _where_modules_lie(self, config: RunConfig) -> tuple[str, Path | None]:
        """Return the knob that names the folder, or `shipped`, and the folder."""
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
        f"drafter.num_draft_tokens={options.num_draft_tokens}: drafter={options.name} has a module for each draft, and "
        f"{there_are}; use drafter.num_draft_tokens={num_modules} or drafter=mtp_eagle"
    )


EAGLE_WEIGHTS = MtpWeights(zoo_folders("mtp_eagle"))
VANILLA_WEIGHTS = MtpWeights(zoo_folders("mtp_vanilla"))

OPTIONS = (
    DrafterOption(
        name="mtp_eagle",
        schema=MtpEagleDrafterConfig,
        load=Deferred("spec_lab.assembly.drafters.mtp_loader", "load_mtp_eagle_drafter"),
        refusals=(EAGLE_WEIGHTS.one_is_missing,),
        folder=EAGLE_WEIGHTS.folder_of_modules,
        aspects=Deferred("spec_lab.doctor.aspects", "mtp_eagle_aspects"),
        hands_hidden_on=True,
        load_tree=Deferred("spec_lab.assembly.drafters.mtp_loader", "load_mtp_eagle_tree_drafter"),
        notes_confidence=True,
        ingests_in_graphs=True,
    ),
    DrafterOption(
        name="mtp_vanilla",
        schema=MtpVanillaDrafterConfig,
        load=Deferred("spec_lab.assembly.drafters.mtp_vanilla_loader", "load_mtp_vanilla_drafter"),
        refusals=(VANILLA_WEIGHTS.one_a_draft_is_missing,),
        folder=VANILLA_WEIGHTS.folder_of_modules,
        aspects=Deferred("spec_lab.doctor.aspects", "mtp_vanilla_aspects"),
        hands_hidden_on=True,
        no_moves="runs every module over the same positions",
        notes_confidence=True,
    ),
)
