"""A runner that decodes nothing, but leaves what the real one leaves, through the real recorder.

What it records depends on the run's seed, its K and nothing else, times included, except when it started.
"""

from __future__ import annotations

import dataclasses
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from spec_lab.config.run import Run
from spec_lab.record import models
from tests.fake_runs import PLAIN, FakeEngine, make_begun, measure, record_run

STAGE_MS = {"verify": 2.4, "accept": 0.1, "catchup": 0.4, "recur": 0.7, "commit": 0.05}


def run(chosen: Run, choices: dict[str, str], folder: Path, last: object = None) -> models.Run:
    """Stands in for `spec_lab.measure.runner.record_run`."""
    config = chosen
    begun = make_begun(
        dataclasses.asdict(config), name=config.name, choices=choices, started_at=datetime.now(UTC).isoformat()
    )
    engine = FakeEngine(config.drafter.num_draft_tokens, STAGE_MS)
    measured = {"plain": PLAIN, "unpruned": engine, "eager": engine}
    references = {str(name): measure(measured[str(name)], (1.0,), config.seed) for name in config.references}
    fixed = {f"k{count}": FakeEngine(count, STAGE_MS) for count in config.fixed_k}
    references |= {name: measure(engine, (1.0,), config.seed) for name, engine in fixed.items()}
    is_lossless = config.acceptance.name in ("strict", "rejection")
    main = measure(engine, (1.0,), config.seed)
    return record_run(folder, begun=begun, main=main, references=references, acceptance_lossless=is_lossless)


def stand_in() -> ModuleType:
    """A module for `sys.modules["spec_lab.measure.runner"]`."""
    module = ModuleType("spec_lab.measure.runner")
    module.record_run = run  # type: ignore[attr-defined]
    return module


def install() -> None:
    """Put the runner in place for good, in a process that runs nothing else."""
    sys.modules["spec_lab.measure.runner"] = stand_in()
