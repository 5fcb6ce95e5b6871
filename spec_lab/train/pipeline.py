"""The stages of a training run, in order. A stage whose output folder exists is skipped."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from spec_lab.train.data import Shard, build_shard, generate_examples, map_in_processes, tokenise_natural_text
from spec_lab.train.drafter import DrafterRecipe
from spec_lab.train.evaluate import EvaluationRecipe, format_table, save_report
from spec_lab.train.generations import Generations, GenerationsRecipe
from spec_lab.train.loop import CurvePoint
from spec_lab.train.target import TargetRecipe, load_target
from spec_lab.train.tokenizer import train_tokenizer
from spec_lab.workloads.example import SPECIAL_TOKENS, render_example

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CorpusRecipe:
    """How much text: generated examples of each checkable category, in shards of one process each, and natural text.

    `num_natural_documents` null takes all of the standard library's training split.
    """

    vocab_size: int
    num_tokenizer_examples_per_category: int
    num_examples_per_category: int
    num_shards: int
    row_length: int
    num_natural_documents: int | None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps what."""

    root: Path

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def corpus(self) -> Path:
        """`rows.npy` and `natural.npy`."""
        return self.root / "corpus"

    @property
    def target(self) -> Path:
        return self.root / "pocket"

    @property
    def generations(self) -> Path:
        return self.root / "generations"

    @property
    def records(self) -> Path:
        """Loss curves and times, a file a stage, and what the evaluation measured."""
        return self.root / "records"

    def drafter(self, name: str) -> Path:
        return self.root / f"pocket-{name}"

    def checkpoint(self, name: str) -> Path:
        return self.root / "checkpoints" / f"{name}.pt"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A whole training run: tokenizer, corpus, target, generations, drafter, evaluation."""

    corpus: CorpusRecipe
    target: TargetRecipe
    generations: GenerationsRecipe
    evaluation: EvaluationRecipe
    output_dir: str
    seed: int
    device: str
    num_workers: int | None
    drafter: DrafterRecipe | None = None

    def run(self) -> RunFolder:
        """Runs what is missing under `output_dir`; the last line printed is that folder."""
        folder = RunFolder(Path(self.output_dir))
        self._stage(folder, folder.tokenizer, self._train_tokenizer)
        self._stage(folder, folder.corpus, self._build_corpus)
        self._stage(folder, folder.target, self._train_target)
        if self.drafter is not None:
            self._stage(folder, folder.generations, self._generate)
            self._stage(folder, folder.drafter(self.drafter.name), self._train_drafter)
        self._evaluate(folder)
        print(folder.root)
        return folder

    def _stage(
        self, folder: RunFolder, output: Path, build: Callable[[RunFolder, Path], list[CurvePoint] | None]
    ) -> None:
        """Builds `output` unless it exists, and records how long it took and the loss curve, if there is one."""
        if output.exists():
            log.info("%s exists: skipped", output)
            return
        log.info("building %s", output)
        started = time.perf_counter()
        with finished_folder(output) as unfinished:
            curve = build(folder, unfinished)
        folder.checkpoint(output.name).unlink(missing_ok=True)
        record = {
            "seconds": time.perf_counter() - started,
            "device": device_name(self._device()),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "curve": None if curve is None else [asdict(point) for point in curve],
        }
        folder.records.mkdir(parents=True, exist_ok=True)
        (folder.records / f"{output.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        log.info("built %s in %.0f s", output, record["seconds"])

    def _train_tokenizer(self, folder: RunFolder, output: Path) -> None:
        number = self.corpus.num_tokenizer_examples_per_category
        texts = [
            render_example(example)
            for category in checkable_categories()
            for example in generate_examples(category, self.seed, number)
        ]
        train_tokenizer([*texts, *self._natural_documents()], self.corpus.vocab_size).save_pretrained(output)

    def _build_corpus(self, folder: RunFolder, output: Path) -> None:
        knobs = self.corpus
        tokenizer_file = str(folder.tokenizer / "tokenizer.json")
        per_shard = -(-knobs.num_examples_per_category // knobs.num_shards)
        first_seed = self.seed * knobs.num_shards
        shards = [
            Shard(tokenizer_file, checkable_categories(), first_seed + number, per_shard, knobs.row_length)
            for number in range(knobs.num_shards)
        ]
        rows = np.concatenate(list(map_in_processes(build_shard, shards, self._num_workers())))
        natural = tokenise_natural_text(tokenizer_file, self._natural_documents())
        log.info("%d rows of %d tokens, %d tokens of natural text", *rows.shape, len(natural))
        np.save(output / "rows.npy", rows)
        np.save(output / "natural.npy", natural)

    def _natural_documents(self) -> list[str]:
        from spec_lab.train import corpus

        return list(corpus.natural_text("train"))[: self.corpus.num_natural_documents]

    def _train_target(self, folder: RunFolder, output: Path) -> list[CurvePoint]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
        checkpoint = folder.checkpoint(folder.target.name)
        curve = self.target.train(tokenizer, folder.corpus, output, checkpoint, self.seed, self._device())
        shutil.copytree(folder.tokenizer, output, dirs_exist_ok=True)
        return curve

    def _generate(self, folder: RunFolder, output: Path) -> None:
        model, tokenizer = load_target(folder.target, self._device())
        if self._device().type == "cuda":
            model = model.to(torch.bfloat16)
        generations = self.generations.run(model, tokenizer, self.seed, self._num_workers())
        generations.save(output / "generations.safetensors")

    def _train_drafter(self, folder: RunFolder, output: Path) -> list[CurvePoint]:
        assert self.drafter is not None
        model, tokenizer = load_target(folder.target, self._device())
        generations = Generations.load(folder.generations / "generations.safetensors")
        markers = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        checkpoint = folder.checkpoint(folder.drafter(self.drafter.name).name)
        return self.drafter.train(model, generations, markers, output, checkpoint, self.seed, self._device())

    def _evaluate(self, folder: RunFolder) -> None:
        """Always runs anew: it is short, and the knobs that matter may have changed."""
        model, tokenizer = load_target(folder.target, self._device())
        match = None
        if self.drafter is not None:
            match = self.drafter.matcher(folder.drafter(self.drafter.name), model, self._device())
        report, samples = self.evaluation.run(model, tokenizer, match)
        save_report(report, samples, folder.records)
        print(format_table(report))

    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def _num_workers(self) -> int:
        return self.num_workers or os.cpu_count() or 1


@contextmanager
def finished_folder(output: Path) -> Iterator[Path]:
    """A folder to write into that becomes `output` once the block is through; what a killed run left is dropped."""
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(output)


def checkable_categories() -> tuple[str, ...]:
    """The categories whose examples are generated, not cut from natural text."""
    from spec_lab.train import corpus

    return corpus.CHECKABLE_CATEGORIES


def device_name(device: torch.device) -> str:
    """As the card names it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
