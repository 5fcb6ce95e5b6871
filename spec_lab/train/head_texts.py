"""The texts on which a drafter for a frozen target is trained: those of a folder, or texts that the same command writes
first."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.app.compose import quoted
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.errors import UserError
from spec_lab.menu.chosen import Chosen
from spec_lab.train.config import TrainConfig
from spec_lab.train.stages import RunFolder, run_stage
from spec_lab.train.texts.folder import Texts
from spec_lab.train.texts.header import HEADER, TextsHeader, WrittenBy, digest_of_weights
from spec_lab.train.texts.job import digests_of_sources, probe, write_texts
from spec_lab.train.texts.plan import Rate, StagePlan, plan_texts, refuse_what_does_not_fit
from spec_lab.train.texts.settings import TextsConfig, settings_of_texts
from spec_lab.train.texts.write import Writer, choose_target

SECONDS_BETWEEN_LOOKS = 1.0
MOST_PROMPTS = 64
"""The most held-out prompts that are decoded during a training."""
STAND_INS = 512
"""The most random-token texts with which a plan is probed if the texts are still to be written."""


@contextmanager
def for_a_while() -> Iterator[None]:
    """Enclose a function that runs an engine for a while, such as to write texts.

    Afterwards the training gets its threads and the device's memory back.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        gc.collect()  # an engine and its graphs are a reference cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class HeadTexts:
    """The texts of a training, which it reads or writes.

    Attributes:
        path: the target's checkpoint.
        folder: the training's folder; its `texts` are written if the configuration names no folder of texts.
    """

    config: TrainConfig
    path: Path
    folder: RunFolder
    device: torch.device

    @property
    def root(self) -> Path:
        """The folder of the texts."""
        return self.folder.root / "texts" if self.config.texts is None else Path(self.config.texts)

    @property
    def are_missing(self) -> bool:
        """Whether the texts must be written first."""
        return self.config.texts is None and not self.root.exists()

    def write(self) -> None:
        """Write the missing texts. Texts that were begun with other settings are refused.

        Raises:
            UserError: see `write_texts`.
        """
        if self.config.texts is not None:
            return
        settings, work = self._settings(), self._work
        identity = {
            "target": digest_of_weights(self.path),
            "prompts": digests_of_sources(settings),
            **settings_of_texts(settings),
        }

        def build(unfinished: Path) -> dict[str, Any]:
            header = _written(self._chosen(settings), settings, work)
            shutil.copytree(work, unfinished, dirs_exist_ok=True)
            return {kind: dict(header.counts(kind)) for kind in ("prompts", "followups", "answers")}

        run_stage(self.folder, self.root, identity, self.device, build)
        shutil.rmtree(work, ignore_errors=True)

    def wait(self) -> None:
        """Wait until another process has written the texts."""
        while self.are_missing:
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def read(self) -> tuple[Texts, Texts, Texts]:
        """Return all texts, those to learn from, and those held out.

        Raises:
            UserError: there are too few texts; none or all of their tokens count; they do not fit rows or positions; or
                another target wrote them.
        """
        if self.are_missing:
            raise UserError(f"{self.root} has no texts yet; run the same command without a flag, or give texts=FOLDER")
        texts = read_texts(self.root, self.path)
        learnt, held_out = texts.split(self.config.packing.held_out)
        if not len(held_out):
            raise UserError(
                f"texts={self.root} has only one conversation, but another one must be held out; write more texts, "
                "into another folder"
            )
        if not 0 < texts.num_written_tokens < len(texts.tokens):
            raise UserError(
                f"texts={self.root}: {texts.num_written_tokens} of {len(texts.tokens)} tokens count, but prompts must "
                "be distinguished from answers; write them again"
            )
        self._refuse_lengths(learnt, held_out)
        return texts, learnt, held_out

    def _refuse_lengths(self, learnt: Texts, held_out: Texts) -> None:
        """Raise UserError if rows are too short for tokens that count, or the target has too few positions to
        decode."""
        row_length, knobs = self.config.packing.row_length, self.config.evaluation
        positions = read_model_config(self.path).max_position_embeddings
        for part in (learnt, held_out):
            if int(part.prompt_lengths.min()) >= row_length:
                longest = min(positions, int(part.lengths.max()))
                raise UserError(
                    f"packing.row_length={row_length} has room only for prompts, and no token of these counts; use "
                    f"packing.row_length={longest}"
                )
        prompt = int(held_out.prompt_lengths[:MOST_PROMPTS].max())
        if prompt + knobs.max_new_tokens > positions:
            raise UserError(
                f"evaluation.max_new_tokens={knobs.max_new_tokens} after a held-out prompt of {prompt} tokens is more "
                f"than the target's {positions} positions; use evaluation.max_new_tokens={max(1, positions - prompt)}"
            )

    def plan(self) -> tuple[StagePlan, Texts]:
        """Estimate by a probe the cost of writing the texts, and return texts of random tokens of the same mean length.

        Texts that an earlier, killed command wrote are not written again.

        Raises:
            UserError: there is no room for them, or other texts were begun here.
        """
        settings, work = self._settings(), self._work
        chosen = self._chosen(settings)
        refuse_what_does_not_fit([_stage(chosen, settings)], self.folder.root, None)
        rate, by = _probed(chosen, settings)
        stage, num_done = _stage(chosen, settings, rate), 0
        if (work / HEADER).exists():
            begun = TextsHeader.read(work)
            begun.refuse_another(TextsHeader(by, settings_of_texts(settings), digests_of_sources(settings)), self.root)
            num_done = begun.counts("answers")["kept"]
        seconds = (stage.seconds or 0) * (1 - num_done / settings.num_texts)
        return replace(stage, num_done=num_done, seconds=seconds), stand_ins(rate, by, settings.num_texts)

    @property
    def _work(self) -> Path:
        """The folder in which the texts are written, so that a killed command can be resumed."""
        return self.folder.checkpoint(self.root).with_suffix("")

    def _settings(self) -> TextsConfig:
        return TextsConfig(prompts=self.config.prompts, **asdict(self.config.writing))

    def _chosen(self, settings: TextsConfig) -> Chosen:
        words = [
            "target=hf",
            quoted("target.path", self.path),
            f"device={self.device}",
            f"dtype={self.config.dtype}",
        ]
        return choose_target(words, settings, "writing.")


def _stage(chosen: Chosen, settings: TextsConfig, rate: Rate | None = None) -> StagePlan:
    """Plan the writing of the texts. Remedies name its keys as in a training, with `writing.` before them."""
    plan = plan_texts(chosen, settings, rate)
    return replace(plan, less_disk="lower writing.num_texts", less_memory="lower writing.batch_size")


@for_a_while()
def _written(chosen: Chosen, settings: TextsConfig, work: Path) -> TextsHeader:
    """Write texts into a folder from which a killed command can resume."""
    return write_texts(Writer.load(chosen, settings), settings, work).header


@for_a_while()
def _probed(chosen: Chosen, settings: TextsConfig) -> tuple[Rate, WrittenBy]:
    """Measure how fast the target writes, and how long its texts are."""
    writer = Writer.load(chosen, settings)
    return probe(writer, settings), writer.written_by()


def stand_ins(rate: Rate, by: WrittenBy, num_texts: int) -> Texts:
    """Return texts of random tokens of the expected mean length, as many as a probe needs."""
    number, prompt = min(STAND_INS, num_texts), max(1, round(rate.prompt_tokens))
    length = prompt + max(2, round(rate.answer_tokens))
    tokens = torch.randint(by.vocab_size, (number * length,), dtype=torch.int32)
    places = torch.arange(number, dtype=torch.int32)
    starts = torch.arange(number + 1) * length
    return Texts(tokens, starts, torch.full((number,), prompt, dtype=torch.int32), places, TextsHeader(by, {}))


def read_texts(folder: Path, target: Path) -> Texts:
    """Read the texts of a folder.

    Raises:
        UserError: there are none, or another target wrote them.
    """
    texts = Texts.load(folder)
    if texts.header.written_by.weights != digest_of_weights(target):
        raise UserError(
            f"texts={folder} were written by another target, {texts.header.written_by.target}; write texts with this "
            "one"
        )
    return texts


def facts_of_texts(texts: Texts) -> dict[str, Any]:
    """Return the facts for a card about the training texts."""
    settings = texts.header.settings
    named = ("temperatures", "top_p", "thinking", "max_new_tokens", "second_turns")
    said = ", ".join(f"{name}={settings[name]}" for name in named if name in settings)
    return {"written_tokens": texts.num_written_tokens, "tokens": len(texts.tokens), "settings": said}


def texts_identity(texts: Texts) -> str:
    """Return a string of the texts' target and their numbers of texts and tokens."""
    return f"{texts.header.written_by.weights[:16]}, {len(texts)} texts, {len(texts.tokens)} tokens"
