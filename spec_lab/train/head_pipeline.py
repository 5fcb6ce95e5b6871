"""A training for a target that is taken as it lies: texts, drafter, evaluation, card. Finished stages are skipped."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from spec_lab.checkpoints.taps import Tap
from spec_lab.core.types import Request
from spec_lab.errors import UserError
from spec_lab.train.checks import target_sizes
from spec_lab.train.config import TrainConfig
from spec_lab.train.decoded import decoded
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.drafter_config import UnrolledTrainingConfig
from spec_lab.train.fitting import filled
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.options import drafter_option, target_option
from spec_lab.train.output import output_folder
from spec_lab.train.packed_rows import PackedRows, TrainingTexts
from spec_lab.train.packed_training import PackedTask, train_packed
from spec_lab.train.serving import Serving
from spec_lab.train.stages import RunFolder, run_stage, write_json
from spec_lab.train.teacher_forced import teacher_forced
from spec_lab.train.unroll import UnrolledDrafter

log = logging.getLogger(__name__)


class HeadRecipe(Protocol):
    """Makes, saves and loads one kind of drafter for a frozen target."""

    @property
    def config(self) -> UnrolledTrainingConfig:
        """The option that was chosen, its sizes filled in."""

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> UnrolledDrafter:
        """Make an untrained one."""

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the hidden states that it reads besides the last."""

    def save(self, drafter: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it as the runtime loads it."""

    def load(self, folder: Path, target: FrozenTarget) -> UnrolledDrafter:
        """Read what `save` wrote, in float32, on the target's device."""

    def describe(self, folder: Path) -> DrafterDescription:
        """Return what the card says of it."""


@dataclass(frozen=True, slots=True)
class HeadPipeline:
    """All stages of such a training."""

    config: TrainConfig
    device: torch.device

    def run(self) -> RunFolder:
        """Run what is missing under `output_dir`; the last line printed is the drafter's folder.

        Raises:
            UserError: a folder cannot be used, or holds what other settings made.
            TrainingDiverged: a loss is no longer finite.
        """
        with output_folder(Path(self.config.output_dir)):
            return self._run()

    def _run(self) -> RunFolder:
        config, option, path = self.config, target_option(self.config.target), self._path()
        assert config.texts is not None
        texts = read_texts(Path(config.texts), path)
        learnt, held_out = texts.split(config.packing.held_out)
        if not len(learnt) or not len(held_out):
            raise UserError(
                f"texts={config.texts} holds {len(texts)} texts, too few to keep packing.held_out="
                f"{config.packing.held_out:g} of them out; write more, or raise packing.held_out"
            )
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        target = FrozenTarget.load(path, self.device, dtype, config.packing.row_length)
        recipe = make_recipe(config)
        folder = RunFolder(Path(config.output_dir), path, target_name=option.name)
        output = folder.drafter(recipe.config.drafts_as)
        settings = {
            "seed": config.seed,
            "texts": texts_identity(texts),
            **asdict(config.packing),
            **asdict(recipe.config),
        }

        def build(unfinished: Path) -> dict[str, Any]:
            return self._train(recipe, target, learnt, folder.checkpoint(output), unfinished)

        run_stage(folder, output, settings, self.device, build)
        report = self._evaluate(recipe, target, held_out, output)
        write_json(folder.config(output), asdict(config))
        write_json(folder.evaluation(output), report)
        print(json.dumps(report, indent=1))
        print(output)
        return folder

    def _path(self) -> Path:
        """Return the target's checkpoint."""
        find = target_option(self.config.target).path
        assert find is not None
        return find(self.config.target)

    def _train(
        self, recipe: HeadRecipe, target: FrozenTarget, texts: TrainingTexts, checkpoint: Path, output: Path
    ) -> dict[str, Any]:
        drafter = recipe.build(target, texts, self.config.seed)
        num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
        log.info("%.2f M parameters, trained on %d texts", num_parameters / 1e6, len(texts))
        packing = self.config.packing
        task = PackedTask(
            target, texts, recipe.taps(target), packing.row_length, checkpoint, self.config.seed, self.device
        )
        curve = train_packed(drafter, recipe.config, task)
        recipe.save(drafter, target, output)
        return {
            "curve": [asdict(point) for point in curve],
            "num_parameters": num_parameters,
            "num_texts": len(texts),
            "row_length": packing.row_length,
        }

    def _evaluate(
        self, recipe: HeadRecipe, target: FrozenTarget, held_out: TrainingTexts, output: Path
    ) -> dict[str, object]:
        packing, steps = self.config.packing, self.config.evaluation.num_draft_tokens
        rows = PackedRows.of(held_out.packed(packing.row_length, self.config.seed), self.device)
        rows = rows.rows(slice(0, MOST_ROWS))
        drafter = recipe.load(output, target).eval()
        batch = recipe.config.optimisation.batch_size
        counts = teacher_forced(drafter, target, rows, recipe.taps(target), steps, batch)
        return {"num_draft_tokens": steps, "teacher_forced": counts.report(), "decoded": self._decode(held_out, output)}

    def _decode(self, held_out: TrainingTexts, output: Path) -> dict[str, Any]:
        """Decode behind held-out prompts with the drafter, and with lookup beside it."""
        knobs = self.config.evaluation
        requests = held_out_requests(held_out, knobs.max_new_tokens)
        longest = max(len(request.prompt_ids) for request in requests) + knobs.max_new_tokens
        path = self._path()
        sizes = knobs.num_draft_tokens, min(knobs.batch_size, len(requests)), longest
        serving = Serving.load(path, self.device, "auto", *sizes)
        drafts_as = self.config.drafter.drafts_as
        return {
            name: decoded(serving, name, folder, requests) for name, folder in ((drafts_as, output), ("ngram", None))
        }


MOST_ROWS, MOST_PROMPTS = 256, 64
"""Held-out rows that are measured, and held-out prompts that are decoded behind."""


def held_out_requests(texts: Any, max_new_tokens: int) -> list[Request]:
    """Return the first prompts of held-out texts."""
    prompts = [
        texts.text(index)[: texts.prompt_lengths[index]].tolist() for index in range(min(len(texts), MOST_PROMPTS))
    ]
    return [
        Request(f"held_out_{index}", "held_out", tuple(prompt), max_new_tokens) for index, prompt in enumerate(prompts)
    ]


def make_recipe(config: TrainConfig) -> HeadRecipe:
    """Make the recipe of the drafter that was chosen, with the sizes of its target."""
    recipe = drafter_option(config.drafter).recipe
    assert recipe is not None
    made: Any = recipe(filled(config.drafter, target_sizes(config)))
    return made


def read_texts(folder: Path, target: Path) -> Any:
    """Read the texts of a folder.

    Raises:
        UserError: there are none, or another target wrote them.
    """
    from spec_lab.train.texts.folder import Texts
    from spec_lab.train.texts.header import digest_of_weights

    texts = Texts.load(folder)
    if texts.header.written_by.weights != digest_of_weights(target):
        raise UserError(
            f"texts={folder} were written by another target, {texts.header.written_by.target}; write texts with this "
            "one"
        )
    return texts


def texts_identity(texts: Any) -> str:
    """Tell one folder's texts from another's."""
    return f"{texts.header.written_by.weights[:16]}, {len(texts)} texts, {len(texts.tokens)} tokens"
