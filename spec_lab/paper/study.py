"""Runs the runs of a paper that have not finished before, so that the same command continues a killed study."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_lab.app.compose import compose
from spec_lab.app.finished import digest_of, finished
from spec_lab.app.folder import free, sweep_name
from spec_lab.app.run import run
from spec_lab.core.ending import print_error
from spec_lab.core.errors import UserError, one_line
from spec_lab.menu.chosen import choose
from spec_lab.menu.refusals.run import admit
from spec_lab.paper.file import PaperFile
from spec_lab.paper.plan import PlannedCell
from spec_lab.record.schema import Status, Summary

SECONDS_A_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A cell and how its run ended; `folder` is None if it was refused."""

    cell: PlannedCell
    status: Status
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class PaperStudy:
    """The runs of a paper and the folder they go to."""

    paper: PaperFile
    cells: Sequence[PlannedCell]
    folder: Path

    def run(self) -> list[Ended]:
        """Run the cells that have not finished before, in the order of the list."""
        return [self._run(number, cell) for number, cell in enumerate(self.cells, start=1)]

    def _run(self, number: int, cell: PlannedCell) -> Ended:
        print(f"[{number}/{len(self.cells)}] {shlex.join(cell.overrides)}", file=sys.stderr)
        try:
            chosen = choose((composed := compose(cell.overrides)).config)
            if (before := finished(self.folder, digest_of(chosen))) is not None:
                return Ended(cell, "finished", before[0])
            run(composed, folder := free(self.folder / f"{number:03d}"))
            return Ended(cell, "finished", folder)
        except Exception as error:
            print_error(error)
            return Ended(cell, "refused" if isinstance(error, UserError) else "failed")


def plan_study(paper: PaperFile, cells: Sequence[PlannedCell], output_dir: Path, fresh: bool) -> PaperStudy:
    """Plan a paper's runs in their folder; without `fresh`, the same runs of the same code get the same folder."""
    commands = [shlex.join(cell.overrides) for cell in cells]
    return PaperStudy(paper, cells, Path(sweep_name(str(output_dir), paper.name, commands, None, fresh)))


def preview(study: PaperStudy) -> tuple[list[str], bool]:
    """Return the lines of the plan, beginning with the number of runs and minutes, and whether any run would be
    refused."""
    lines: list[str] = []
    seconds: list[float] = []
    refused = False
    for number, cell in enumerate(study.cells, start=1):
        reason, ran = _look(study, number, cell)
        refused |= reason is not None
        seconds += [] if ran is None else [ran]
        state = "" if ran is None else " (has run)"
        lines.append(f"[{number}] {shlex.join(cell.overrides)}{state}")
        lines += [] if reason is None else [f"    refused: {one_line(reason)}"]
    return [_how_long(study, seconds), *lines], refused


def _look(study: PaperStudy, number: int, cell: PlannedCell) -> tuple[str | None, float | None]:
    """Return why a cell would be refused, and how long its run took if it has finished."""
    try:
        chosen = admit(compose(cell.overrides).config)
    except UserError as error:
        return str(error), None
    before: tuple[Path, Summary] | None = finished(study.folder, digest_of(chosen))
    return None, None if before is None else before[1]["seconds"]


def _how_long(study: PaperStudy, seconds: Sequence[float]) -> str:
    """Return how many runs are left, and their time if it is known, from finished runs or else from the file."""
    total, left = len(study.cells), len(study.cells) - len(seconds)
    runs = f"{total} runs" if left == total else f"{total} runs, {left} of them left"
    if seconds:
        minutes = left * sum(seconds) / len(seconds) / SECONDS_A_MINUTE
        return f"{runs}: about {minutes:.1f} minutes, estimated from the finished ones"
    if study.paper.minutes is not None:
        return f"{runs}: {study.paper.minutes:g} minutes, says {study.paper.path}"
    return f"{runs}: the time is unknown; --plan estimates it once a run has finished"
