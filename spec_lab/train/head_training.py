"""Trains one drafter for a frozen target, and compares it with the engine before and after the training."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from spec_lab.config.choices import Dtype
from spec_lab.core.types import Request
from spec_lab.train.config import EvaluationConfig, TrainConfig
from spec_lab.train.drafter_config import PackedTrainingConfig
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.group import ALONE, TrainingGroup
from spec_lab.train.head_recipe import HeadRecipe
from spec_lab.train.head_texts import MOST_PROMPTS, for_a_while
from spec_lab.train.layouts import WrittenFor
from spec_lab.train.loop import Watch
from spec_lab.train.options import drafter_option
from spec_lab.train.packed_rows import PackedRows, TrainingTexts
from spec_lab.train.packed_training import PackedTask
from spec_lab.train.proof import Prover
from spec_lab.train.serving import Serving
from spec_lab.train.truth import Tracker, Truth

log = logging.getLogger(__name__)

MOST_ROWS = 64
"""The most held-out rows for teacher forcing."""


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """The training of a drafter.

    Attributes:
        path: the target's checkpoint, which the engine loads separately.
        work: a folder that survives a killed training. It contains the best weights, and `NAME.pt` next to it is the
            checkpoint.
    """

    config: TrainConfig
    recipe: HeadRecipe
    path: Path
    target: FrozenTarget
    learnt: TrainingTexts
    held_out: Any
    work: Path
    device: torch.device
    tracker: Tracker | None = None
    group: TrainingGroup = ALONE

    def run(self, output: Path) -> dict[str, Any]:
        """Train, write the best weights to `output`, and return the facts for its record.

        Raises:
            NotServed: the training forward and the engine disagree.
            TrainingDiverged: a loss is no longer finite.
        """
        recipe, drafter = self.recipe, self._drafter()
        num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
        log.info("%.2f M parameters, trained on %d texts", num_parameters / 1e6, len(self.learnt))
        prover = self._prover()
        before = self._prove_as_it_is(prover, drafter)
        prover.require_oracle()
        truth = self._truth(drafter, prover)
        truth.begin()
        curve = recipe.form.train(drafter, recipe.config, self._task(truth))
        shutil.copytree(truth.folder, output, dirs_exist_ok=True)
        after = prover.prove(recipe.config.drafts_as, output)
        self._write_layouts(output, prover)
        return {
            "curve": [asdict(point) for point in curve],
            "num_parameters": num_parameters,
            "num_texts": len(self.learnt),
            "num_steps": truth.points[-1]["step"],
            "num_processes": self.group.size,
            "truth": truth.report(),
            "proof": {"before": asdict(before), "after": asdict(after), "in_bfloat16": self._rounded(prover, output)},
        }

    def _write_layouts(self, output: Path, prover: Prover) -> None:
        written_for = WrittenFor(prover.target, self.path.name, self.recipe.taps(self.target))
        write_layouts(self.config.layouts, self.recipe.config, output, written_for, prover)

    def follow(self) -> None:
        """Take part in the training as a further process; the first process does everything else."""
        self.recipe.form.train(self._drafter(), self.recipe.config, self._task(None))

    def _drafter(self) -> Any:
        return self.recipe.build(self.target, self.learnt, self.config.seed).to(self.device)

    def _task(self, watch: Watch | None) -> PackedTask:
        return PackedTask(
            target=self.target,
            texts=self.learnt,
            taps=self.recipe.taps(self.target),
            row_length=self.config.packing.row_length,
            checkpoint=self.work.with_suffix(".pt"),
            seed=self.config.seed,
            device=self.device,
            watch=watch,
            group=self.group,
            kept_bytes=self.config.packing.kept_gigabytes * 1e9,
        )

    def _prover(self) -> Prover:
        return Prover.of(self.path, self.held_out.tokens, self.config.evaluation.num_draft_tokens, self.recipe)

    def _prove_as_it_is(self, prover: Prover, drafter: Any) -> Any:
        folder = self.work.with_name(self.work.name + "-before")
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed training
        self.recipe.save(drafter, self.target, folder)
        proof = prover.prove(self.recipe.config.drafts_as, folder)
        self._rounded(prover, folder)
        self._write_layouts(folder, prover)
        shutil.rmtree(folder)
        log.info("proved: training and serving differ by %.2g in logits", max(proof.differences))
        return proof

    @for_a_while()
    def _rounded(self, prover: Prover, folder: Path) -> float | None:
        """Compare with the engine in bfloat16, and return the difference; None on a CPU without dtype=bfloat16."""
        if self.device.type == "cpu" and self.config.dtype != Dtype.bfloat16:
            return None
        num_drafts, longest = prover.serving.num_draft_tokens, prover.serving.longest
        length = len(longest.prompt_ids) + longest.max_new_tokens
        words = self.recipe.config.drafter_words
        serving = Serving.load(
            self.path, self.device, "bfloat16", num_drafts, 1, length, "kernels=torch", of_drafter=words
        )
        apart = prover.prove_rounded(self.recipe.config.drafts_as, folder, serving)
        log.info("proved: in bfloat16 the engine's logits differ from the training's by %.3f of their variation", apart)
        return apart

    def _truth(self, drafter: Any, prover: Prover) -> Truth:
        knobs, packing, recipe = self.config.evaluation, self.config.packing, self.recipe
        requests = held_out_requests(self.held_out, knobs.max_new_tokens)
        rows = PackedRows.of(self.held_out.packed(packing.row_length, self.config.seed), self.device)
        rows = rows.rows(slice(0, MOST_ROWS))
        taps, batch_size = recipe.taps(self.target), recipe.config.optimisation.batch_size

        def forced() -> Mapping[str, Any]:
            counts = recipe.form.forced(drafter, self.target, rows, taps, knobs.num_draft_tokens, batch_size)
            return counts.report()

        def export(folder: Path) -> None:
            recipe.save(drafter, self.target, folder)
            prover.prove(recipe.config.drafts_as, folder)

        return Truth(
            every=knobs.every,
            name=recipe.config.drafts_as,
            serving=serving_of(self.path, self.device, requests, knobs, recipe.config.drafter_words),
            requests=requests,
            export=export,
            forced=forced,
            folder=self.work,
            tracker=self.tracker,
        )


def write_layouts(
    names: Iterable[str], drafter: PackedTrainingConfig, folder: Path, written_for: WrittenFor, prover: Prover
) -> None:
    """Write a drafter in other projects' layouts, load each back, and compare its tensors and its logits with ours.

    Raises:
        NotServed: its logits differ.
    """
    known = drafter_option(drafter).layouts
    for name in names:
        layout = known[name].load()
        layout.write(folder, folder / name, written_for)
        assert layout.holds(folder, folder / name)
        prover.require_same(drafter.drafts_as, folder, folder / name)


def forget(work: Path) -> None:
    """Delete the files that only a resumed training would read."""
    for folder in (work, *work.parent.glob(f"{work.name}-*")):
        shutil.rmtree(folder, ignore_errors=True)
    work.with_suffix(".json").unlink(missing_ok=True)


def serving_of(
    path: Path, device: torch.device, requests: list[Request], knobs: EvaluationConfig, of_drafter: tuple[str, ...]
) -> Serving:
    """Load the engine with room for these requests. `of_drafter` are overrides of the drafter that it will have."""
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    return Serving.load(
        path,
        device,
        "auto",
        knobs.num_draft_tokens,
        min(knobs.batch_size, len(requests)),
        longest,
        of_drafter=of_drafter,
    )


def held_out_requests(texts: Any, max_new_tokens: int) -> list[Request]:
    """Return the first prompts of held-out texts."""
    prompts = [
        texts.text(index)[: texts.prompt_lengths[index]].tolist() for index in range(min(len(texts), MOST_PROMPTS))
    ]
    return [
        Request(f"held_out_{index}", "held_out", tuple(prompt), max_new_tokens) for index, prompt in enumerate(prompts)
    ]
