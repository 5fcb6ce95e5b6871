"""Stages of a training: their output folders, when they are skipped, and their records."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from spec_lab.core.errors import Breakdown, UserError
from spec_lab.train.drafter_config import Loss
from spec_lab.train.module_config import Optimiser
from spec_lab.train.reading import read_record, refuse_damaged

log = logging.getLogger(__name__)

FAILURE = "failure"
"""The entry of a stage's record with the reason of its breakdown."""
CAME_LATER = {
    "loss": Loss.kl,
    "norms_taps": False,
    "norms_output": False,
    "max_seconds": None,
    "optimiser": Optimiser.adamw,
}
"""Keys that folders of earlier versions lack, with the value that reproduces those versions."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run's outputs; several runs that train drafters for one target may share it, even at once.

    `target`: the checkpoint. `target_name`: the prefix of the drafters' folders.
    """

    root: Path
    target: Path
    target_name: str

    @property
    def records(self) -> Path:
        """The records of the stages, and the results of evaluations."""
        return self.root / "records"

    def drafter(self, name: str) -> Path:
        return self.root / f"{self.target_name}-{name}"

    def record(self, output: Path) -> Path:
        return self.records / f"{output.name}.json"

    def config(self, output: Path) -> Path:
        """Return the file with the whole configuration of the training of `output`."""
        return self.records / f"{output.name}-config.json"

    def evaluation(self, output: Path) -> Path:
        """Return the file with the measurements of `output`."""
        return self.records / f"{output.name}-evaluation.json"

    def checkpoint(self, output: Path) -> Path:
        return self.root / "checkpoints" / f"{output.name}.pt"


def run_stage(
    folder: RunFolder,
    output: Path,
    recipe: dict[str, Any],
    device: torch.device,
    build: Callable[[Path], dict[str, Any]],
) -> None:
    """Build `output` with `build(unfinished folder)`, whose result goes into the record, unless `output` exists.

    If several processes want the same output, one builds it and the others wait. A refused build leaves no new record
    or checkpoint. A build that breaks down leaves a record that says so, and the next build may have another recipe.

    Raises:
        UserError: `output` was begun with another `recipe`, has no record or is damaged, or `build` refuses.
        Breakdown: `build` breaks down.
    """
    with _locked(folder.record(output).with_suffix(".lock")):
        _refuse_another_recipe(folder.record(output), output, recipe)
        if output.exists():
            _refuse_without_record(folder.record(output), output)
            refuse_damaged(output)
            log.info("%s exists: skipped", output)
            return
        log.info("building %s", output)
        record: dict[str, Any] = {
            "recipe": recipe,
            "device": device_name(device),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        made_here = [file for file in (folder.record(output), folder.checkpoint(output)) if not file.exists()]
        write_json(folder.record(output), record)
        started = time.perf_counter()
        try:
            _build_stage(folder, output, record, started, build)
        except UserError:
            _drop(unfinished_folder(output), *made_here)
            raise
        except Breakdown as error:
            write_json(folder.record(output), record | {"seconds": time.perf_counter() - started, FAILURE: str(error)})
            _drop(unfinished_folder(output), folder.checkpoint(output))
            raise


def _build_stage(
    folder: RunFolder,
    output: Path,
    record: dict[str, Any],
    started: float,
    build: Callable[[Path], dict[str, Any]],
) -> None:
    with finished_folder(output) as unfinished:
        facts = build(unfinished)
        record |= {"seconds": time.perf_counter() - started, **facts}
        write_json(folder.record(output), record)
    folder.checkpoint(output).unlink(missing_ok=True)
    log.info("built %s in %.0f s", output, record["seconds"])


def _drop(unfinished: Path, *files: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    for file in files:
        file.unlink(missing_ok=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of `file` against other processes; the system releases it when a process dies.

    A refused block deletes the file, so a process that waited for it must lock the new file in its place.
    """
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if not _lies_at(file, opened):
                continue
            try:
                yield
            except UserError:
                file.unlink()
                raise
            return


def _lies_at(file: Path, opened: TextIO) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(opened.fileno()))
    except FileNotFoundError:
        return False


def _refuse_another_recipe(record_file: Path, output: Path, recipe: dict[str, Any]) -> None:
    if not record_file.exists():
        return
    record = read_record(record_file)
    if FAILURE in record and not output.exists():
        return
    if changed := changed_settings(record["recipe"], recipe):
        raise UserError(
            f"{output} was begun with a different {', '.join(changed)}; choose another output_dir, or delete "
            f"{record_file}, that folder and all files that were made from it"
        )


def without_unused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the keys of `CAME_LATER` that have the value given there.

    Such keys are removed at the top level and under `optimisation`.
    """
    return {
        key: without_unused(value) if key == "optimisation" else value
        for key, value in settings.items()
        if key not in CAME_LATER or value != CAME_LATER[key]
    }


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys of `after` that differ in `before`, and the keys of `CAME_LATER` that only `before` uses."""
    first, second = without_unused(before), without_unused(after)
    keys = [*second, *(key for key in first if key in CAME_LATER and key not in second)]
    return [key for key in keys if first.get(key) != second.get(key)]


def _refuse_without_record(record_file: Path, output: Path) -> None:
    if not record_file.exists():
        raise UserError(f"{output} exists, but has no {record_file} that describes it; choose another output_dir")


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file as `write_text` does."""
    write_text(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a file atomically, and make its folder if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def unfinished_folder(output: Path) -> Path:
    """Return the folder where `output` is built."""
    return output.with_name(output.name + ".unfinished")


@contextmanager
def finished_folder(output: Path) -> Iterator[Path]:
    """Yield a new folder, which becomes `output` when the block has succeeded. Remains of a killed run are deleted."""
    unfinished = unfinished_folder(output)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(output)


def device_name(device: torch.device) -> str:
    """Return the name of the device for a card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
