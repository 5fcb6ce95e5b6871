"""A training run: tokenizer, corpus, target, generations, drafter, evaluation, cards.

Finished stages are skipped. The evaluation and the cards are made every time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spec_lab.core.errors import UserError
from spec_lab.corpus.categories import CHECKABLE_CATEGORIES
from spec_lab.corpus.example import END_OF_TEXT, SPECIAL_TOKENS, render_example
from spec_lab.corpus.natural import natural_text
from spec_lab.train.card import drafter_card, target_card
from spec_lab.train.checks import SHIPPED_TARGET
from spec_lab.train.config import TrainConfig
from spec_lab.train.data import (
    Shard,
    TrainingTokens,
    build_shard,
    generate_examples,
    map_in_processes,
    tokenise_natural_text,
)
from spec_lab.train.drafter import DrafterRecipe, TrainingTask
from spec_lab.train.evaluate import EvaluationRecipe, format_table
from spec_lab.train.generations import CorpusTexts, DrafterTexts, Generations, GenerationsRecipe
from spec_lab.train.group import training_device
from spec_lab.train.loop import CurvePoint
from spec_lab.train.output import output_folder
from spec_lab.train.sharing import stage_settings
from spec_lab.train.stages import RunFolder, run_stage, write_json, write_text
from spec_lab.train.target import TargetRecipe, load_target, without_progress_bars
from spec_lab.train.target_config import DecoderTrainingConfig
from spec_lab.train.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All stages of a training, as built by `spec_lab.train.recipes`.

    If `target` is None, the shipped target is used, and the stages before it are skipped. If `drafter` is None, the
    stages between the target and the evaluation are skipped.
    """

    config: TrainConfig
    target: TargetRecipe | None
    drafter: DrafterRecipe | None

    def run(self) -> RunFolder:
        """Run the missing stages under `output_dir`; the last line printed is that folder.

        Raises:
            UserError: the device, the folder or a setting cannot be used, or the folder has results of other settings.
            TrainingDiverged: a loss is no longer finite.
        """
        self._device()
        with output_folder(Path(self.config.output_dir)), without_progress_bars():
            return self._run()

    def _run(self) -> RunFolder:
        folder = self._folder()
        if self.target is not None:
            self._stage(folder, folder.tokenizer, self._train_tokenizer)
            self._stage(folder, folder.corpus, self._build_corpus)
            self._stage(folder, folder.target, self._train_target)
        if self.drafter is not None:
            made_for = {"target": _digest(folder.target / "model.safetensors")}
            if self.config.target.writes_texts:
                self._stage(folder, folder.generations, self._generate, made_for)
            self._stage(folder, folder.drafter(self.drafter.config.drafts_as), self._train_drafter, made_for)
        self._evaluate(folder)
        self._write_cards(folder)
        print(folder.root)
        return folder

    def _folder(self) -> RunFolder:
        root, target = Path(self.config.output_dir), self.config.trained_target
        return RunFolder(root, SHIPPED_TARGET) if target is None else RunFolder(root, target_name=target.option)

    def _stage(self, folder: RunFolder, output: Path, build: Any, made_for: dict[str, str] | None = None) -> None:
        settings = {**(made_for or {}), **stage_settings(self.config)[output.name]}
        run_stage(folder, output, settings, self._device(), lambda unfinished: build(folder, unfinished))

    def _train_tokenizer(self, folder: RunFolder, output: Path) -> dict[str, Any]:
        if not self.config.target.own_vocabulary:
            for name in TOKENIZER_FILES:
                shutil.copy(SHIPPED_TARGET / name, output)
            return {}
        texts = [
            render_example(example)
            for category in CHECKABLE_CATEGORIES
            for example in generate_examples(
                category, self.config.seed, self.config.tokenizer.num_examples_per_category
            )
        ]
        train_tokenizer([*texts, *self._natural_documents()], self.config.tokenizer.vocab_size).save_pretrained(output)
        return {}

    def _build_corpus(self, folder: RunFolder, output: Path) -> dict[str, Any]:
        knobs = self.config.corpus
        tokenizer_file = str(folder.tokenizer / "tokenizer.json")
        per_shard = -(-knobs.num_examples_per_category // knobs.num_shards)
        first_seed = self.config.seed * knobs.num_shards
        shards = [
            Shard(tokenizer_file, CHECKABLE_CATEGORIES, first_seed + number, per_shard, knobs.row_length)
            for number in range(knobs.num_shards)
        ]
        rows = np.concatenate(list(map_in_processes(build_shard, shards, self._num_workers())))
        natural = tokenise_natural_text(tokenizer_file, self._natural_documents())
        if len(natural) <= knobs.row_length:
            raise UserError(
                f"corpus.num_natural_documents={knobs.num_natural_documents} are {len(natural)} tokens, which do not "
                f"fill a row of corpus.row_length={knobs.row_length}; take more documents"
            )
        np.save(output / "rows.npy", rows)
        np.save(output / "natural.npy", natural)
        num_examples = per_shard * knobs.num_shards * len(CHECKABLE_CATEGORIES)
        return {"num_examples": num_examples, "num_rows": len(rows), "num_natural_tokens": len(natural)}

    def _natural_documents(self) -> list[str]:
        return list(natural_text("train"))[: self.config.corpus.num_natural_documents]

    def _train_target(self, folder: RunFolder, output: Path) -> dict[str, Any]:
        from transformers import AutoTokenizer

        assert self.target is not None
        tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer, trust_remote_code=False)
        checkpoint = folder.checkpoint(folder.target)
        curve = self.target.train(tokenizer, folder.corpus, output, checkpoint, self.config.seed, self._device())
        shutil.copytree(folder.tokenizer, output, dirs_exist_ok=True)
        return {"curve": _plain(curve)}

    def _generate(self, folder: RunFolder, output: Path) -> dict[str, Any]:
        model, tokenizer = load_target(folder.target, self._device())
        if self._device().type == "cuda":
            model = model.to(torch.bfloat16)
        generations = GenerationsRecipe(self.config.generations).run(
            model, tokenizer, self.config.seed, self._num_workers()
        )
        generations.save(output / "generations.safetensors")
        return {"num_texts": len(generations.tokens)}

    def _train_drafter(self, folder: RunFolder, output: Path) -> dict[str, Any]:
        assert self.drafter is not None
        model, tokenizer = load_target(folder.target, self._device())
        texts = self._texts(folder, tokenizer)
        markers = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        checkpoint = folder.checkpoint(folder.drafter(self.drafter.config.drafts_as))
        task = TrainingTask(model, texts, markers, checkpoint, self.config.seed, self._device())
        return {"curve": _plain(self.drafter.train(task, output))}

    def _texts(self, folder: RunFolder, tokenizer: PreTrainedTokenizerFast) -> DrafterTexts:
        """Return the texts on which the drafter is trained."""
        if self.config.target.writes_texts:
            return Generations.load(folder.generations / "generations.safetensors")
        target = self.config.trained_target
        assert isinstance(target, DecoderTrainingConfig)
        end_of_text_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        return CorpusTexts(
            TrainingTokens.load(folder.corpus, target.drafter_natural_fraction, end_of_text_id, self._device())
        )

    def _evaluate(self, folder: RunFolder) -> None:
        """Run the evaluation, every time, since it is short and no later stage depends on it."""
        model, tokenizer = load_target(folder.target, self._device())
        match = None
        if self.drafter is not None:
            match = self.drafter.matcher(folder.drafter(self.drafter.config.drafts_as), model, self._device())
        report, samples = EvaluationRecipe(self.config.evaluation).run(model, tokenizer, match)
        write_json(folder.config(self._measured(folder)), asdict(self.config))
        write_json(folder.evaluation(self._measured(folder)), report)
        write_json(folder.samples(self._measured(folder)), [asdict(sample) for sample in samples])
        print(format_table(report))

    def _measured(self, folder: RunFolder) -> Path:
        """Return the folder that the evaluation is about: the drafter's, or the target's if there is none."""
        return folder.target if self.drafter is None else folder.drafter(self.drafter.config.drafts_as)

    def _write_cards(self, folder: RunFolder) -> None:
        measured, kind = self._measured(folder), None
        if self.drafter is not None:
            description = self.drafter.describe(measured)
            kind = description.kind
            card = drafter_card(folder, measured, description, self.command())
            write_text(measured / "README.md", card)
        if self.target is not None:
            card = target_card(folder, self.target.describe(folder.target), measured, kind, self.command())
            write_text(folder.target / "README.md", card)

    def plan(self) -> str:
        """Refuse, since a pocket target's stages cannot be planned."""
        raise UserError("--plan is for target=hf and target=smollm2_135m; leave it out")

    def show_data(self, number: int) -> str:
        """Refuse, since a pocket target's texts are made during the training."""
        raise UserError("--show-data is for target=hf and target=smollm2_135m; leave it out")

    def command(self) -> str:
        """Return the training command for cards, with its choice of target and drafter, but without other overrides."""
        trained = self.config.trained_target
        target = "" if trained is None else f" target={trained.option}"
        return (
            f"python -m spec_lab.train{target} drafter={'none' if self.drafter is None else self.drafter.config.name}"
        )

    def _device(self) -> torch.device:
        return training_device(self.config.device)

    def _num_workers(self) -> int:
        return self.config.num_workers or os.cpu_count() or 1


def _plain(curve: list[CurvePoint]) -> list[dict[str, Any]]:
    return [asdict(point) for point in curve]


def _digest(file: Path) -> str:
    """Return a digest that identifies a target's weights."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
