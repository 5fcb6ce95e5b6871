"""A runner that decodes nothing, but leaves what the real one leaves, through the real recorder.

What it records depends on the run's seed, its K and nothing else, times included, except when it started.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_lab.config.run import Run
from spec_lab.record.measured import RunInfo
from spec_lab.record.recorder import Recorder, request_row, utc_now
from spec_lab.record.schema import Summary
from spec_lab.record.summary import build_summary
from tests.fake_runs import PLAIN, PROVENANCE, FakeEngine, measure

STAGE_MS = {"verify": 2.4, "accept": 0.1, "catchup": 0.4, "recur": 0.7, "commit": 0.05}


def run(config: Run, choices: dict[str, str], folder: Path, *_: Any) -> Summary:
    """Stands in for `spec_lab.measure.runner.run` and for `record_run`."""
    info = RunInfo(config.name, choices, dataclasses.asdict(config), PROVENANCE, utc_now())
    engine = FakeEngine(config.drafter.num_draft_tokens, STAGE_MS)
    main = measure(engine, (1.0,), config.seed)
    with Recorder(folder, info) as recorder:
        for record in main.requests:
            recorder.request(
                request_row(record, f"text of {record.request_id}", main.correct.get(record.request_id), None)
            )
        recorder.rounds(0, main.rounds)
        references = {"plain": measure(PLAIN, (1.0,), config.seed)}
        if "unpruned" in config.references:
            references["unpruned"] = measure(engine, (1.0,), config.seed)
        summary = build_summary(info, main, references, seconds=recorder.seconds)
        recorder.finish(summary)
    return summary


def stand_in() -> ModuleType:
    """A module for `sys.modules["spec_lab.measure.runner"]`."""
    module = ModuleType("spec_lab.measure.runner")
    module.record_run = run  # type: ignore[attr-defined]
    return module


def install() -> None:
    """Put the runner in place for good, in a process that runs nothing else."""
    sys.modules["spec_lab.measure.runner"] = stand_in()
