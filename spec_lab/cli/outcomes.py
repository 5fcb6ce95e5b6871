"""Records how jobs in other processes ended, in the folder of their multirun, and reads it back.

What a job returns to its launcher is lost if the worker dies, and a later process cannot read it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from spec_lab.cli.job import JobOutcome
from spec_lab.core.regular import regular_text
from spec_lab.record.recorder import write_json

OUTCOMES_FOLDER = ".jobs"
DIED = "it has begun but not ended"


class Outcomes:
    """A small file for each job in a multirun's folder, written when the job begins, and again when it has ended."""

    def __init__(self, sweep: Path) -> None:
        self._sweep = sweep
        self._folder = sweep / OUTCOMES_FOLDER

    def begin(self, number: int) -> None:
        """Record that a job has begun, with the status `failed`, which remains if the job never reports its end."""
        self.end(number, JobOutcome("failed", reason=DIED))

    def end(self, number: int, outcome: JobOutcome) -> None:
        """Record how a job ended."""
        self._folder.mkdir(exist_ok=True)
        folder = None if outcome.folder is None else outcome.folder.name
        values = {"status": outcome.status, "folder": folder, "reason": outcome.reason, "earlier": outcome.earlier}
        write_json(self._folder / f"{number}.json", values)

    def read(self) -> list[JobOutcome]:
        """Read the outcomes of all jobs that have begun, in the order of their numbers."""
        files = sorted(self._folder.glob("[0-9]*.json"), key=lambda file: int(file.stem))
        return [self._outcome(json.loads(regular_text(file))) for file in files]

    def clear(self) -> None:
        """Delete all outcomes: before the jobs begin, and after the multirun has counted them."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _outcome(self, values: dict[str, Any]) -> JobOutcome:
        folder = None if values["folder"] is None else self._sweep / values["folder"]
        return JobOutcome(values["status"], folder, values["reason"], values["earlier"])
