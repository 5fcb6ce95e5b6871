"""Runs the runs of a paper that have not ended before, so that the same command continues a killed study."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_lab.cli.job import JobOutcome
from spec_lab.cli.listed_run import held_sweep, run_listed
from spec_lab.core.errors import UserError, one_line
from spec_lab.menu.refusals.run import admit
from spec_lab.paper.file import PaperFile
from spec_lab.paper.plan import PlannedCell
from spec_lab.program.compose import compose_run
from spec_lab.program.folder import Study, close_sweep, find_ended, folder_name, study_place
from spec_lab.program.ground import Ground, ground_of
from spec_lab.program.mixed import MixNote
from spec_lab.program.overrides import extensions_in
from spec_lab.program.sweep_progress import SweepProgress
from spec_lab.record.reading import read_summary

SECONDS_A_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A cell and how its run ended."""

    cell: PlannedCell
    outcome: JobOutcome


@dataclass(frozen=True, slots=True)
class PaperStudy:
    """The runs of a paper and the folder they go to."""

    paper: PaperFile
    cells: Sequence[PlannedCell]
    folder: Path
    ground: Ground

    def run(self) -> list[Ended]:
        """Run the cells that have not ended before, in the order of the list.

        Raises:
            UserError: the folder cannot be written, or another process runs this paper.
        """
        with held_sweep(self.folder, self.ground):
            return self._run_all()

    def _run_all(self) -> list[Ended]:
        mix, progress = MixNote(), SweepProgress()
        ended: list[Ended] = []
        for number, cell in enumerate(self.cells, start=1):
            progress.begin(number, len(self.cells))
            outcome = run_listed(number, cell.overrides, self.folder, mix)
            progress.end(not outcome.earlier and outcome.status != "refused")
            ended.append(Ended(cell, outcome))
        close_sweep(self.folder, [each.outcome.status for each in ended])
        return ended


def plan_study(paper: PaperFile, cells: Sequence[PlannedCell], output_dir: Path, fresh: bool) -> PaperStudy:
    """Plan a paper's runs in their folder; without `fresh`, the same runs on the same ground get the same folder."""
    commands = [list(cell.overrides) for cell in cells]
    extensions = dict.fromkeys(name for command in commands for name in extensions_in(command))
    ground = ground_of(commands, tuple(extensions))
    folder = study_place(output_dir, Study(paper.name, commands), ground, fresh)
    return PaperStudy(paper, cells, folder, ground)


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
        config, choices = compose_run(cell.overrides)
        admit(config)
    except UserError as error:
        return str(error), None
    ended = find_ended(study.folder / f"{number:03d}", folder_name(config, choices))
    if ended is None or ended[1] != "finished":
        return None, None
    return None, read_summary(ended[0])["seconds"]


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
