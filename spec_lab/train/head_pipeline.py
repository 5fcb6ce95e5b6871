"""A training for a target such as hf: texts, drafter, evaluation, card. Finished texts and drafters are kept."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.core.errors import UserError
from spec_lab.train.checks import refuse, target_sizes
from spec_lab.train.config import TrainConfig
from spec_lab.train.fitting import filled
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.group import ALONE, TrainingGroup, joined, training_device
from spec_lab.train.head_card import head_card
from spec_lab.train.head_evaluation import evaluated
from spec_lab.train.head_plan import Probe, planned, show
from spec_lab.train.head_recipe import HeadRecipe
from spec_lab.train.head_texts import HeadTexts, facts_of_texts, texts_identity
from spec_lab.train.head_training import HeadTraining, forget
from spec_lab.train.options import drafter_option, target_option
from spec_lab.train.output import output_folder
from spec_lab.train.stages import RunFolder, run_stage, write_json, write_text
from spec_lab.train.tracking import tracked
from spec_lab.wiring.models import resolve_dtype

log = logging.getLogger(__name__)


def build_pipeline(config: TrainConfig) -> HeadPipeline:
    """Make the pipeline for `config`.

    Raises:
        UserError: see `spec_lab.train.checks`.
    """
    refuse(config)
    return HeadPipeline(config, training_device(config.device))


@dataclass(frozen=True, slots=True)
class HeadPipeline:
    """All stages of a training of a drafter for a target such as hf."""

    config: TrainConfig
    device: torch.device
    group: TrainingGroup = ALONE

    def run(self) -> RunFolder:
        """Run the missing stages under `output_dir`; the last line printed is the drafter's folder.

        Raises:
            UserError: a folder or a setting cannot be used, or a folder holds results of other settings.
            TrainingDiverged: a loss is no longer finite.
            NotServed: the training forward and the engine disagree.
        """
        with joined(self.config.device) as (group, device):
            own, batch_size = replace(self, group=group, device=device), self._batch_size()
            if group.size > batch_size:
                raise UserError(
                    f"drafter.optimisation.batch_size={batch_size} is less than the {group.size} processes that were "
                    f"started; use drafter.optimisation.batch_size={group.size}"
                )
            if self.config.packing.kept_gigabytes and device.type != "cpu":
                raise UserError(
                    f"packing.kept_gigabytes={self.config.packing.kept_gigabytes:g} is for a CPU: on a GPU every step "
                    "runs the target; leave it out"
                )
            if group.rank:  # the first process handles the folder and all messages
                logging.getLogger("spec_lab").setLevel(logging.WARNING)
                return own._run()
            with output_folder(Path(self.config.output_dir)):
                return own._run()

    def _run(self) -> RunFolder:
        self._warn()
        config, path, folder, written = self.config, self._path(), self._folder(), self._texts()
        if self.group.rank:
            written.wait()
        else:
            written.write()
        texts, learnt, held_out = written.read()
        target, recipe = self._target(path), make_recipe(config)
        output = folder.drafter(recipe.config.drafts_as)
        settings = {
            "seed": config.seed,
            "texts": texts_identity(texts),
            **{key: value for key, value in asdict(config.packing).items() if key != "kept_gigabytes"},
            **asdict(recipe.config),
        }

        work = folder.checkpoint(output).with_suffix("")

        if self.group.rank:
            if not self.group.agree(0.0):
                HeadTraining(
                    config, recipe, path, target, learnt, held_out, work, self.device, None, self.group
                ).follow()
            return folder
        self.group.agree(float(output.exists()))

        def build(unfinished: Path) -> dict[str, Any]:
            with tracked(config, folder.root, output.name) as tracker:
                facts = HeadTraining(
                    config, recipe, path, target, learnt, held_out, work, self.device, tracker, self.group
                ).run(unfinished)
            return {**facts, "texts": facts_of_texts(learnt)}

        run_stage(folder, output, settings, self.device, build)
        if missing := [name for name in config.layouts if not (output / name).exists()]:
            raise UserError(
                f"layouts=[{','.join(missing)}] is not in {output}, whose training has ended; leave it out, or choose "
                "another output_dir"
            )
        forget(work)
        write_json(folder.config(output), asdict(config))
        self._describe(recipe, folder, output, texts.header.settings.get("thinking"))
        print(output)
        return folder

    def plan(self) -> str:
        """Return an estimate of the training's cost from a few steps, whose results are discarded.

        Raises:
            UserError: there is no room for it.
        """
        self._warn()
        path, written, texts, recipe = self._path(), self._texts(), None, make_recipe(self.config)
        if written.are_missing:
            texts, learnt = written.plan()
        else:
            _, learnt, _ = written.read()
        probe = Probe(recipe, self._target(path), learnt, self.config.packing.row_length, texts)
        return planned(probe, Path(self.config.output_dir))

    def show_data(self, number: int) -> str:
        """Return some of the texts, with the tokens that count marked."""
        texts, *_ = self._texts().read()
        return show(texts, self._path(), number)

    def _warn(self) -> None:
        """Warn, before anything runs, if more drafts are measured than are trained."""
        measured, learnt = self.config.evaluation.num_draft_tokens, make_recipe(self.config).config.num_trained_drafts
        if measured > learnt and not self.group.rank:
            log.warning(
                "evaluation.num_draft_tokens=%d is over drafter.num_unrolled_steps=%d: later drafts come from states "
                "that no training has seen, and fewer of them are accepted",
                measured,
                learnt,
            )

    def _target(self, path: Path) -> FrozenTarget:
        dtype = resolve_dtype(self.config.dtype, self.device)
        return FrozenTarget.load(path, self.device, dtype, self.config.packing.row_length)

    def _texts(self) -> HeadTexts:
        return HeadTexts(self.config, self._path(), self._folder(), self.device)

    def _folder(self) -> RunFolder:
        return RunFolder(Path(self.config.output_dir), self._path(), target_name=target_option(self.config.target).name)

    def _describe(self, recipe: HeadRecipe, folder: RunFolder, output: Path, thinking: bool | None) -> None:
        """Measure by category if there are questions, and write the card."""
        knobs, measured = self.config.evaluation, {}
        if knobs.prompts:
            measured = evaluated(self._path(), self.device, recipe.config, output, knobs, thinking)
            write_json(folder.evaluation(output), measured)
        record = json.loads(folder.record(output).read_text(encoding="utf-8"))
        card = head_card(output, folder.target.name, recipe.describe(output), record, measured)
        write_text(output / "README.md", card)

    def _batch_size(self) -> int:
        return self.config.drafter.optimisation.batch_size

    def _path(self) -> Path:
        """Return the target's checkpoint."""
        return target_option(self.config.target).path(self.config.target)


def make_recipe(config: TrainConfig) -> HeadRecipe:
    """Make the recipe of the chosen drafter, with nulls replaced by the sizes of the target (`filled`)."""
    return drafter_option(config.drafter).recipe(filled(config.drafter, target_sizes(config)))
