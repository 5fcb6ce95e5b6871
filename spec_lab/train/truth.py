"""Measures a head while it is trained: at regular steps the lab's engine decodes held-out prompts with it.

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
from typing import Any

import numpy as np

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Request
from spec_lab.record.draft_counts import acceptance_length, draft_counts
from spec_lab.train.serving import Serving

log = logging.getLogger(__name__)

NUM_RESAMPLES = 500


def figures(records: Sequence[RequestRecord], num_draft_tokens: int) -> dict[str, Any]:
    """Return the figures of some requests, with a 95 % bootstrap interval over requests."""
    drawn = np.random.default_rng(0).integers(len(records), size=(NUM_RESAMPLES, len(records)))
    lengths = [acceptance_length([records[index] for index in sample], num_draft_tokens) for sample in drawn]
    known = [length for length in lengths if length is not None]
    return {
        "acceptance_length": acceptance_length(records, num_draft_tokens),
        "interval": [float(bound) for bound in np.percentile(known, [2.5, 97.5])] if known else None,
        "conditional_rates": draft_counts(records, num_draft_tokens).conditional,
        "requests": len(records),
    }


def decoded(serving: Serving, drafter: str, folder: Path | None, requests: Sequence[Request]) -> dict[str, Any]:
    """Decode with a drafter; return its `figures`, and those of each category."""
    records, num_drafts = serving.decode(drafter, folder, requests), serving.num_draft_tokens
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    by_category = {name: figures(group, num_drafts) for name, group in sorted(groups.items())}
    return {**figures(records, num_drafts), "by_category": by_category}


@dataclass(slots=True)
class Truth:
    """Measures a head in training by decoding with it, and keeps the best weights in `folder`.

    Attributes:
        name: the drafter's option, as in `drafter=NAME`.
        export: writes the head's current weights to a folder, and proves them.
        forced: returns the report of teacher forcing with the current weights.
        log: receives a step and its figures by name, such as W&B.
        lines: the figures of two baselines, `ngram` and the untrained head, by name.
        points: the figures of each step that was measured.
        best_step: the step of the weights in `folder`; None before the first measurement.
    """

    name: str
    serving: Serving
    requests: list[Request]
    export: Callable[[Path], object]
    forced: Callable[[], Mapping[str, Any]]
    folder: Path
    log: Callable[[int, Mapping[str, Any]], None]
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None

    def begin(self, untrained: Path) -> None:
        """Measure the baselines. A resumed training reads them, and its earlier figures, from a file."""
        file = self.folder.with_suffix(".json")
        if file.exists():
            kept = json.loads(file.read_text())
            self.lines, self.points, self.best_step = kept["lines"], kept["points"], kept["best_step"]
            return
        self.lines = {
            "ngram": decoded(self.serving, "ngram", None, self.requests),
            "untrained": decoded(self.serving, self.name, untrained, self.requests),
        }
        self._write()

    def look(self, step: int) -> None:
        """Decode with the current weights, and keep them if they are better than those kept.

        A resumed training starts at its checkpoint, so it measures the steps after that again. Weights that were kept
        of those steps make room for the current ones, since the figures of that step are gone.
        """
        self.points = [point for point in self.points if point["step"] < step]
        now = self.folder.with_name(f"{self.folder.name}-{step}")
        shutil.rmtree(now, ignore_errors=True)  # a training that was killed here left it
        self.export(now)
        real, forced = decoded(self.serving, self.name, now, self.requests), self.forced()
        length = real["acceptance_length"] or 0.0
        kept = [point for point in self.points if point["step"] == self.best_step]
        self.points.append({"step": step, "decoded": real, "teacher_forced": forced})
        is_best = not kept or length > (kept[0]["decoded"]["acceptance_length"] or 0.0)
        self.best_step = step if is_best else self.best_step
        self._write()  # before the weights: if killed between the two, this step is measured again, and replaced
        if is_best:
            shutil.rmtree(self.folder, ignore_errors=True)
            now.rename(self.folder)
        else:
            shutil.rmtree(now)
        gc.collect()  # an engine and its caches are a reference cycle
        log.info("step %d: length %.3f in decoding, %.3f forced", step, length, forced["acceptance_length"])
        self._log(step, real, forced)

    def report(self) -> dict[str, Any]:
        """Return the figures of baselines and steps, and the step with the best weights."""
        return {"lines": self.lines, "points": self.points, "best_step": self.best_step}

    def _log(self, step: int, real: Mapping[str, Any], forced: Mapping[str, Any]) -> None:
        low, high = real["interval"] or (None, None)
        named: dict[str, Any] = {"decoded/low": low, "decoded/high": high}
        for kind, of_kind in (("decoded", real), ("teacher_forced", forced), *self.lines.items()):
            named[f"{kind}/acceptance_length"] = of_kind["acceptance_length"]
            rates = enumerate(of_kind["conditional_rates"], start=1)
            named |= {f"{kind}/position_{position}": rate for position, rate in rates}
        self.log(step, named)

    def _write(self) -> None:
        file = self.folder.with_suffix(".json")
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.report(), indent=1))
        unfinished.replace(file)
