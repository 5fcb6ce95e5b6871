"""Runs one composed run in its folder. The record there is valid from the beginning, and says how the run ended."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from spec_lab.app.compose import Composed, to_composed
from spec_lab.app.names import digest_of, folder_name, free
from spec_lab.config.checks import admit
from spec_lab.config.extensions import load_options
from spec_lab.config.option import get
from spec_lab.core.ending import print_error
from spec_lab.core.errors import UserError
from spec_lab.core.ranks import ranks
from spec_lab.record.models import Run
from spec_lab.record.names import SUMMARY_FILE
from spec_lab.record.provenance import machine_of, origins
from spec_lab.record.reading import Found, find_runs, read_run
from spec_lab.record.recorder import STILL_RUNNING, begun, ended, ending, write_run
from spec_lab.study.run_table import format_run

if TYPE_CHECKING:
    from spec_lab.build.models import Last


def job(cfg: DictConfig) -> float | None:
    """Hydra's task: run what was composed, and return the number that `objective` names.

    A job of a multirun that finished is not run again while everything that it read is unchanged. After an error it
    returns None, so that the other jobs go on.
    """
    settings = HydraConfig.get()
    folder, in_sweep = Path(settings.runtime.output_dir), not OmegaConf.is_missing(settings.job, "num")
    if in_sweep and ranks().size > 1:
        raise UserError("a multirun works in one process; start each of its runs with its own torchrun")
    composed = to_composed(cfg, settings)
    config = composed.config
    if ranks().rank > 0:  # the first one records
        config.logger = get("logger", "jsonl")()
    if in_sweep:
        config.logger.join_sweep(folder.parent.name)
    done = finished(folder.parent, digest_of(config)) if in_sweep else None
    try:
        done = done or run(composed, folder)
    except Exception as error:
        if not in_sweep:
            raise
        print_error(error)
        return None
    return done.scalars().get(config.objective)


def finished(sweep: Path, read: str) -> Run | None:
    """Return the finished run in the folder of a sweep that read the same, by its name; None if there is none."""
    for file in sorted(sweep.glob(f"*-{read}/{SUMMARY_FILE}")):
        if (before := read_run(file.parent)).status == "finished":
            print(f"finished before: {os.path.relpath(file.parent)}")
            return before
    return None


def run(composed: Composed, folder: Path) -> Run:
    """Check a run, run it in `folder`, print its tables, and return its record.

    Raises:
        UserError: the run is refused, or the machine cannot do it.
    """
    config = composed.config
    machine = machine_of(extensions=origins(load_options(config.extensions)))
    write_run(folder, begun(asdict(config), composed.choices, machine=machine))
    try:
        admit(config)
        if config.engine.name == "lab":
            from spec_lab.measure.runner import record_run as record
        else:
            from spec_lab.measure.other_engine import record_engine_run as record
        done = record(config, composed.choices, folder, last_models())
    except BaseException as error:
        if (so_far := read_run(folder)).reason == STILL_RUNNING:
            write_run(folder, ended(so_far, *ending(error)))
        raise
    if ranks().rank == 0:
        print(f"{format_run(done)}\n{os.path.relpath(folder)}")
    return done


@cache
def last_models() -> Last:
    """Return what keeps the models of this process' last run for the next one."""
    from spec_lab.build.models import Last

    return Last()


class Multirun(Callback):
    """What Hydra calls when all jobs of a multirun are through: `hydra.callbacks` of conf/config.yaml.

    It prints a line for each run in the folder, and ends the command with the code of the worst that began with it.
    Jobs may have run in other processes, so their records are read.
    """

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self._began = datetime.now(UTC).isoformat(timespec="microseconds")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from spec_lab.study.report import sweep_text

        folder = os.path.relpath(config.hydra.sweep.dir)
        runs = find_runs(folder)
        print(f"{sweep_text(runs)}\n\nmore: python -m spec_lab.report {folder}\n{folder}")
        statuses = {found.run.status for found in runs if found.run.started_at >= self._began}
        if statuses - {"finished"}:
            sys.exit(2 if statuses <= {"finished", "refused"} else 1)


def run_anew(composed: Composed) -> Found:
    """Run in a new folder below its `output_dir`, as other programs and notebooks do; one at a time is possible."""
    config = composed.config
    folder = free(Path(config.output_dir).absolute() / folder_name(config, composed.typed))
    return Found(folder, run(composed, folder))
