"""A job of a sweep that finished is not run again while everything that it read is unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spec_lab.app.folder import digest, sources, values_read
from spec_lab.config.choices import Weights
from spec_lab.config.run import Run
from spec_lab.core.file_stamps import file_stamps
from spec_lab.record import models
from spec_lab.record.names import SUMMARY_FILE
from spec_lab.record.reading import read_run

READ_FILE = "read.txt"
"""The file in a run's folder with the digest of what the run read."""


def digest_of(run: Run) -> str:
    """Return a digest of a run's configuration, the source files, and the weights and prompt files that it names."""
    values = values_read(asdict(run))
    drafter: Any = run.drafter
    reads_weights = hasattr(drafter, "folder") and getattr(drafter, "weights", None) != Weights.random
    weights = [run.target.folder, *([drafter.folder(run)] if reads_weights else []), *run.engine.weights]
    if not run.engine.lasting:
        values["at"] = time.time_ns()
    return digest(sources(tuple(run.extensions)), values, file_stamps([*weights, *_paths(values)]))


def finished(sweep: Path, read: str) -> tuple[Path, models.Run] | None:
    """Return the finished run below the folder of a sweep that read the same; None if there is none."""
    for file in sorted(sweep.glob(f"*/{READ_FILE}")):
        if file.read_text() == read and (file.parent / SUMMARY_FILE).exists():
            run = read_run(file.parent)
            if run.status == "finished":
                return file.parent, run
    return None


def _paths(values: Any) -> Iterator[Path]:
    """Yield the files and folders that a configuration names."""
    if isinstance(values, dict):
        for key, value in values.items():
            if isinstance(value, str) and key.endswith("path") and Path(value).exists():
                yield Path(value)
            yield from _paths(value)
