"""Prints the progress of a sweep, as in `job 3 of 12, 250 s so far, about 750 s to go`, even into a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

SWEEPER = "BasicSweeper"
"""Hydra's own sweeper, whose jobs are all combinations of the swept values."""


class SweepProgress:
    """Prints before each job its number. Once a job has run here, it adds the time so far, and an estimate of the
    remaining time if the total is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._job_began = self._began
        self._ran: list[float] = []

    def begin(self, number: int, total: int | None) -> None:
        """Print that job `number`, counted from 1, of `total` begins; `total` is None if unknown."""
        print(self._line(number, total), flush=True)
        self._job_began = self._clock()

    def end(self, ran: bool) -> None:
        """Note the time of the job that began last, if it ran here."""
        if ran:
            self._ran.append(self._clock() - self._job_began)

    def _line(self, number: int, total: int | None) -> str:
        of = "" if total is None else f" of {total}"
        parts = [f"job {number}{of}"]
        if self._ran:
            parts.append(f"{self._clock() - self._began:.0f} s so far")
        if self._ran and total is not None:
            left = (total - number + 1) * sum(self._ran) / len(self._ran)
            parts.append(f"about {left:.0f} s to go")
        return ", ".join(parts)


def count_jobs(overrides: Sequence[str], sweeper: Mapping[str, Any]) -> int | None:
    """Return the number of jobs of a multirun; None if it does not follow from the arguments.

    Args:
        overrides: the typed overrides; they replace an experiment's sweep of the same key.
        sweeper: the config of Hydra's sweeper, whose parameters an experiment may set.
    """
    if not str(sweeper.get("_target_", "")).endswith(SWEEPER):
        return None
    of_experiment = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    sizes: dict[str, int] = {}
    try:
        for override in OverridesParser.create().parse_overrides([*of_experiment, *overrides]):
            values = override.sweep_string_iterator() if override.is_sweep_override() else iter([""])
            sizes[override.get_key_element()] = sum(1 for _ in values)
    except (HydraException, AssertionError):  # a glob needs the folders of options, an interval has no number of values
        return None
    return math.prod(sizes.values())
