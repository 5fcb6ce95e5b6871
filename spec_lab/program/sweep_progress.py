"""Says how far a sweep is: `job 3 of 12, 250 s so far, about 750 s to go`, in a pipe too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

SWEEPER = "BasicSweeper"
"""Hydra's own, whose jobs are the product of all that is swept."""


class SweepProgress:
    """Tells before each job how many there are, and from those that ran here how long the others will take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._job_began = self._began
        self._ran: list[float] = []

    def begin(self, number: int, total: int | None) -> None:
        """Say which job begins, from 1, of how many; `total` is None where nobody knows."""
        print(self._line(number, total), flush=True)
        self._job_began = self._clock()

    def end(self, ran: bool) -> None:
        """Take the time of the job that began last, where it ran here."""
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
    """Count the jobs of a multirun; None where only its sweeper knows.

    Args:
        overrides: what was typed; it stands in for what an experiment sweeps of the same key.
        sweeper: Hydra's sweeper, whose parameters an experiment may set.
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
