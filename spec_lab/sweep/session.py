"""Runs a sweep: one proposal after the other, each recorded like a job of a multirun."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.cli.job import JobOutcome
from spec_lab.cli.listed_run import held_sweep, run_listed
from spec_lab.program.folder import close_sweep
from spec_lab.program.ground import Ground
from spec_lab.program.sweep_progress import SweepProgress
from spec_lab.record.reading import read_run
from spec_lab.sweep.command import as_overrides
from spec_lab.sweep.file import SearchMethod, SweepFile
from spec_lab.sweep.ledger import Ledger
from spec_lab.sweep.search import Search, Tried
from spec_lab.sweep.space import override_key


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of a sweep and how it ended. `metric` is None if the file names no metric, or the run has no value."""

    number: int
    parameters: dict[str, Any]
    outcome: JobOutcome
    metric: float | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep: its runs, their number, and their folder.

    Attributes:
        overrides: those typed after the file, for every run; they override those of the file's command.
        limit: the largest number of runs; None is possible only for a grid, which ends by itself.
    """

    file: SweepFile
    search: Search
    overrides: tuple[str, ...]
    limit: int | None
    folder: Path
    ground: Ground

    def run(self) -> list[Trial]:
        """Run everything that has not finished or been refused before, until the grid is done, or the limit or the
        metric's target is reached.

        Raises:
            UserError: the folder cannot be written, or another process runs this sweep.
        """
        with held_sweep(self.folder, self.ground):
            return self._run_all()

    def _run_all(self) -> list[Trial]:
        ledger = Ledger(self.folder, {"file": self.file.config, "seed": self.search.seed, "overrides": self.overrides})
        trials: list[Trial] = []
        progress = SweepProgress()
        while self.limit is None or len(trials) < self.limit:
            parameters = self._parameters(ledger, trials)
            if parameters is None:
                break
            progress.begin(len(trials) + 1, self._num_runs)
            trials.append(self._run_one(len(trials), parameters))
            progress.end(not trials[-1].outcome.earlier and trials[-1].outcome.status != "refused")
            _note_missing_metric(self.file, trials)
            if _reached(self.file, trials[-1].metric):
                break
        close_sweep(self.folder, [trial.outcome.status for trial in trials])
        return trials

    @property
    def _num_runs(self) -> int | None:
        """Return the largest number of runs; None if only W&B's code knows the size of the grid."""
        parameters = self.file.parameters.values()
        is_grid = self.file.method == SearchMethod.grid and all({"value", "values"} & one.keys() for one in parameters)
        sizes = [len(one.get("values", [None])) for one in parameters]
        counts = [*([math.prod(sizes)] if is_grid else []), *([] if self.limit is None else [self.limit])]
        return min(counts, default=None)

    def overrides_of(self, parameters: dict[str, Any]) -> list[str]:
        """Return the overrides of one run. Typed overrides replace those of the file's command with the same key."""
        typed = {override_key(text) for text in self.overrides}
        fixed = [text for text in self.file.overrides if override_key(text) not in typed]
        return [*fixed, *as_overrides(parameters), *self.overrides]

    def _parameters(self, ledger: Ledger, trials: Sequence[Trial]) -> dict[str, Any] | None:
        if len(trials) < len(ledger.proposals):
            return ledger.proposals[len(trials)]
        tried = [Tried(trial.parameters, trial.outcome.status, trial.metric) for trial in trials]
        parameters = self.search.propose(len(trials), tried)
        if parameters is not None:
            ledger.append(parameters)
        return parameters

    def _run_one(self, number: int, parameters: dict[str, Any]) -> Trial:
        outcome = run_listed(number + 1, self.overrides_of(parameters), self.folder)
        metric = None
        if self.file.metric is not None and outcome.folder is not None and outcome.status == "finished":
            metric = read_run(outcome.folder).scalars().get(self.file.metric)
        return Trial(number, parameters, outcome, metric)


def _note_missing_metric(file: SweepFile, trials: Sequence[Trial]) -> None:
    """If the first run that ended well has no value to search by, say so; later runs may have one."""
    finished = [trial for trial in trials if trial.outcome.status == "finished"]
    if file.metric is not None and finished == [trials[-1]] and trials[-1].metric is None:
        remedy = "; a speedup needs references=[plain] in the command" if "speedup" in file.metric else ""
        print(f"run {len(trials)} has no {file.metric}, which metric.name requires{remedy}", file=sys.stderr)


def _reached(file: SweepFile, metric: float | None) -> bool:
    """Return whether the metric has reached the file's target, which ends the sweep."""
    if metric is None or file.target is None:
        return False
    return metric >= file.target if file.maximizes else metric <= file.target
