"""Runs one composed run in its folder. The record there is valid from the beginning, and says how the run ended."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spec_lab.app.compose import Composed, chosen_options, to_composed
from spec_lab.app.finished import READ_FILE, digest_of, finished
from spec_lab.config.checks import admit
from spec_lab.config.extensions import load_options
from spec_lab.config.option import get
from spec_lab.core.ending import print_error
from spec_lab.core.errors import Breakdown, UserError, describe_error
from spec_lab.core.ranks import ranks
from spec_lab.record.models import Run
from spec_lab.record.names import SUMMARY_FILE, Status
from spec_lab.record.provenance import origins
from spec_lab.record.reading import read_run
from spec_lab.record.recorder import LOADING, NOT_ENDED, begun, ended, write_run
from spec_lab.study.run_table import format_run

if TYPE_CHECKING:
    from spec_lab.build.models import LastModels


def job(cfg: DictConfig) -> float | None:
    """Hydra's task: run what was composed, and return the number that `objective` names.

    In a multirun it returns None after an error, which is printed and recorded, so that the other jobs go on.
    """
    settings = HydraConfig.get()
    folder, in_sweep = Path(settings.runtime.output_dir), not OmegaConf.is_missing(settings.job, "num")
    try:
        if in_sweep and ranks().size > 1:
            raise UserError("a multirun works in one process; start each of its runs with its own torchrun")
        composed = to_composed(cfg, settings)
        if ranks().rank > 0:  # the first one records
            composed.config.logger = get("logger", "jsonl")()
        if in_sweep:
            composed.config.logger.join_sweep(folder.parent.name)
        done = run(composed, folder, folder.parent if in_sweep and not composed.config.fresh else None)
        print(f"{format_run(done)}\n{display(folder)}")
        return done.scalars().get(composed.config.objective)
    except Exception as error:
        # It could not be composed. An earlier refusal in this folder is written anew, since the sweep's exit code
        # counts what this call wrote.
        if not (folder / SUMMARY_FILE).exists() or read_run(folder).status == "refused":
            values: Any = OmegaConf.to_container(cfg, throw_on_missing=False)
            write_run(folder, ended(_begun(values, chosen_options(settings)), *_ending(error)))
        if not in_sweep:
            raise
        print_error(error)
        return None


def run(composed: Composed, folder: Path, sweep: Path | None = None) -> Run:
    """Check a run, run it in `folder`, and return its record.

    Args:
        sweep: a folder of runs. If one of them finished and read the same, its record is returned instead.

    Raises:
        UserError: the run is refused, or the machine cannot do it.
    """
    admit(composed.config)
    read = digest_of(composed.config)
    if sweep is not None and (before := finished(sweep, read)) is not None:
        print(f"finished before: {display(before[0])}")
        return before[1]
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, ended(_begun(asdict(composed.config), composed.choices), "interrupted", LOADING))
    (folder / READ_FILE).write_text(read)
    try:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler; torch reads it when it loads
        if composed.config.engine.name == "lab":
            from spec_lab.measure.runner import record_run as record
        else:
            from spec_lab.measure.other_engine import record_engine_run as record
        return record(composed.config, composed.choices, folder, last_models())
    except BaseException as error:
        if (so_far := read_run(folder)).reason in NOT_ENDED:
            write_run(folder, ended(so_far, *_ending(error)))
        elif isinstance(error, UserError):  # the run had begun
            raise Breakdown(str(error)) from error
        raise


@cache
def last_models() -> LastModels:
    """Return the models of this process' last run: jobs in a row that use the same files read them once."""
    from spec_lab.build.models import LastModels

    return LastModels()


def _begun(values: dict[str, Any], choices: dict[str, str]) -> Run:
    return begun(values, choices, origins(load_options(values["extensions"])))


def _ending(error: BaseException) -> tuple[Status, str]:
    """Return how a run that did not begin ended by this error, and why."""
    if isinstance(error, UserError):
        return "refused", str(error)
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", describe_error(error)


def display(folder: Path) -> str:
    """Return the path, relative to the working directory if it is below it."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)
