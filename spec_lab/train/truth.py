"""Measures a drafter during its training: at regular steps the lab's engine decodes held-out prompts with it.

The real acceptance length is recorded beside the one that teacher forcing estimates. The weights with the largest real
length are kept as the best.
"""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spec_lab.core.types import Request
from spec_lab.train.decoded import decoded
from spec_lab.train.loop import CurvePoint
from spec_lab.train.serving import Serving
from spec_lab.train.stages import write_json

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives the figures of a training while it runs, such as W&B."""

    def log(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Record the figures of a step."""


@dataclass(slots=True)
class Truth:
    """Measures a drafter in training by decoding with it, and keeps the best weights in `folder`.

    Attributes:
        every: training steps between two measurements.
        name: the drafter's option, as in `drafter=NAME`.
        export: writes the drafter's current weights to a folder.
        forced: returns the report of teacher forcing with the current weights.
        lines: the figures of two baselines, `ngram` and the untrained drafter, by name.
        points: the figures of each step that was measured.
        best_step: the step of the weights in `folder`; None before the first measurement.
    """

    every: int
    name: str
    serving: Serving
    requests: Sequence[Request]
    export: Callable[[Path], None]
    forced: Callable[[], Mapping[str, Any]]
    folder: Path
    tracker: Tracker | None
    lines: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None

    @property
    def file(self) -> Path:
        """The JSON file of all figures, beside the folder of the best weights."""
        return self.folder.with_suffix(".json")

    def begin(self) -> None:
        """Measure the baselines. A resumed training reads them, and its earlier figures, from the file."""
        if self.file.exists():
            kept = json.loads(self.file.read_text())
            self.lines, self.points, self.best_step = kept["lines"], kept["points"], kept.get("best_step")
            return
        untrained = self.folder.with_name(self.folder.name + "-untrained")
        self.export(untrained)
        self.lines = {
            "ngram": decoded(self.serving, "ngram", None, self.requests),
            "untrained": decoded(self.serving, self.name, untrained, self.requests),
        }
        shutil.rmtree(untrained)
        self._write()

    def point(self, point: CurvePoint) -> None:
        if self.tracker is not None:
            self.tracker.log(point.step, {"loss": point.loss})

    def look(self, step: int) -> None:
        """Decode with the current weights, and keep them if they are better than those kept.

        A resumed training starts at its checkpoint, so it measures the steps after that again. Weights that were kept
        of those steps make room for the current ones, since the figures of that step are gone.
        """
        self.points = [point for point in self.points if point["step"] < step]
        now = self.folder.with_name(f"{self.folder.name}-{step}")
        shutil.rmtree(now, ignore_errors=True)  # a training that was killed here left it
        self.export(now)
        real = decoded(self.serving, self.name, now, self.requests)
        forced = self.forced()
        best = next((length_of(point) for point in self.points if point["step"] == self.best_step), -1.0)
        self.points.append({"step": step, "decoded": real, "teacher_forced": forced})
        if length_of(self.points[-1]) > best:
            self.best_step = step
        self._write()  # before the weights: if killed between the two, this step is measured again, and replaced
        if self.best_step == step:
            shutil.rmtree(self.folder, ignore_errors=True)
            now.rename(self.folder)
        else:
            shutil.rmtree(now)
        gc.collect()  # an engine and its caches are a reference cycle
        log.info(
            "step %d: acceptance length %.3f in decoding, %s; %.3f by teacher forcing",
            step,
            length_of(self.points[-1]),
            of_interval(real["interval"]),
            forced["acceptance_length"],
        )
        if self.tracker is not None:
            self.tracker.log(step, self._figures())

    def report(self) -> dict[str, Any]:
        """Return the figures of baselines and steps, and the step with the best weights."""
        return {"lines": self.lines, "points": self.points, "best_step": self.best_step}

    def _figures(self) -> dict[str, float | None]:
        last = self.points[-1]
        real, forced = last["decoded"], last["teacher_forced"]
        low, high = real["interval"] or (None, None)
        figures = {
            "decoded/acceptance_length": real["acceptance_length"],
            "decoded/low": low,
            "decoded/high": high,
            "teacher_forced/acceptance_length": forced["acceptance_length"],
            **{f"{line}/acceptance_length": of["acceptance_length"] for line, of in self.lines.items()},
        }
        for kind, of_kind in (("decoded", real), ("teacher_forced", forced)):
            rates = enumerate(of_kind["conditional_rates"], start=1)
            figures |= {f"{kind}/position_{position}": rate for position, rate in rates}
        return figures

    def _write(self) -> None:
        write_json(self.file, self.report())


def length_of(point: Mapping[str, Any]) -> float:
    """Return the acceptance length of a point; 0 if no round was judged."""
    return float(point["decoded"]["acceptance_length"] or 0.0)


def of_interval(interval: Sequence[float] | None) -> str:
    """Return the 95 % interval of resampled lengths as text."""
    return "no interval" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
