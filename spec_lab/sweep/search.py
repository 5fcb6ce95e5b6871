"""Asks W&B's search code for the parameters of the next run. The same seed and results give the same parameters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.record.recorder import Status
from spec_lab.sweep.file import SweepFile
from spec_lab.sweep.library import load_library, quiet
from spec_lab.sweep.plain import to_plain

STATES: dict[Status, str] = {
    "finished": "finished",
    "failed": "failed",
    "refused": "failed",
    "interrupted": "killed",
}
"""W&B's words for how a run ended. The sweep file's `impute` says how W&B counts a run without a metric."""


@dataclass(frozen=True, slots=True)
class Tried:
    """An earlier run, as the search sees it. `metric` is None if the run has none."""

    parameters: dict[str, Any]
    status: Status
    metric: float | None


@dataclass(frozen=True, slots=True)
class Search:
    """W&B's search over the parameters of one sweep file."""

    file: SweepFile
    seed: int

    def propose(self, number: int, tried: Sequence[Tried]) -> dict[str, Any] | None:
        """Return the parameters of run `number`, or None at the end of a grid.

        W&B draws from the global random generators. They are seeded for each run, and restored afterwards. So the
        proposals do not depend on how often the sweep was stopped.
        """
        library = load_library()
        runs = [self._as_library_run(library, trial) for trial in tried]
        with quiet(), _seeded(self.seed, number):
            proposal = library.next_run(self.file.config, runs)
        if proposal is None:
            return None
        parameters = self.file.parameters
        return {name: to_plain(entry["value"], parameters[name].get("q")) for name, entry in proposal.config.items()}

    def rehearse(self) -> None:
        """Propose twice, so that a sweep file that W&B cannot handle is refused before anything runs.

        Raises:
            UserError: W&B's search fails on the file.
        """
        tried: list[Tried] = []
        for number in range(2):
            try:
                parameters = self.propose(number, tried)
            except Exception as error:  # the library may raise any class
                reason = " ".join(str(error).split()) or type(error).__name__
                raise UserError(f"{self.file.path}: W&B's search cannot use it ({reason})") from error
            if parameters is None:
                break
            tried.append(Tried(parameters, "finished", float(number)))

    def _as_library_run(self, library: Any, trial: Tried) -> Any:
        metrics = {} if trial.metric is None else {self.file.metric: float(trial.metric)}
        return library.SweepRun(
            config={name: {"value": value} for name, value in trial.parameters.items()},
            state=library.RunState(STATES[trial.status]),
            summaryMetrics=metrics,
        )


@contextmanager
def _seeded(seed: int, number: int) -> Iterator[None]:
    import numpy as np

    before, numpy_before = random.getstate(), np.random.get_state()
    own = random.Random(f"{seed} {number}")
    random.seed(own.getrandbits(64))
    np.random.seed(own.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
