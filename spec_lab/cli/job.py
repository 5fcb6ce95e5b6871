"""One composed run from its checks to its end: what it leaves in its folder, and what the process makes of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spec_lab.cli.dry_run import describe
from spec_lab.cli.ending import EXIT_CODES, print_refusal, print_trouble
from spec_lab.cli.folder import folder_name, make_folder
from spec_lab.compatibility.run import refusals, refuse
from spec_lab.config import RunConfig
from spec_lab.errors import UserError, describe_error
from spec_lab.record.provenance import collect_provenance
from spec_lab.record.recorder import utc_now, write_status
from spec_lab.record.schema import Status
from spec_lab.record.sinks import REQUESTS_FILE
from spec_lab.record.summary import RunInfo


def worst_exit_code(statuses: Iterable[Status]) -> int:
    """That of the worst of several jobs; a failure is worse than a refusal."""
    ended = set(statuses)
    return next((EXIT_CODES[status] for status in ("failed", "refused") if status in ended), 0)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended. `folder` is None where nothing was written: a dry run, or a run refused on its own."""

    status: Status
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A composed run.

    Attributes:
        choices: option taken of each group.
        base: folder in which the job makes its own.
        in_sweep: whether it is one of several, so that its refusal has to be on record.
    """

    config: RunConfig
    choices: dict[str, str]
    base: Path
    in_sweep: bool


def run_job(job: Job) -> JobOutcome:
    """Check, run and record a job. Its errors end up in the outcome; only Ctrl-C is raised on, to end a sweep too."""
    try:
        if job.config.dry_run:
            return _dry_run(job)
        refuse(job.config)
        folder = make_folder(job.base, folder_name(job.config, job.choices))
    except UserError as error:
        return _refused(job, None, error)
    except Exception as error:
        return JobOutcome(print_trouble(error))
    return _run_in(folder, job)


def _dry_run(job: Job) -> JobOutcome:
    refused = refusals(job.config)
    print(describe(job.config, job.choices, refused))
    return JobOutcome("refused" if refused else "finished")


def _run_in(folder: Path, job: Job) -> JobOutcome:
    _record(folder, job, "interrupted", "it was killed while its models were loaded")
    try:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch loads: the profiler's own chatter
        from spec_lab.measure.runner import run

        run(job.config, job.choices, folder)
    except KeyboardInterrupt:
        if not _has_begun(folder):
            _record(folder, job, "interrupted", "KeyboardInterrupt")
        raise
    except Exception as error:
        if isinstance(error, UserError) and not _has_begun(folder):
            return _refused(job, folder, error)
        traceback.print_exc()
        if not _has_begun(folder):
            _record(folder, job, "failed", describe_error(error))
        return JobOutcome("failed", folder)
    return JobOutcome("finished", folder)


def _refused(job: Job, folder: Path | None, error: UserError) -> JobOutcome:
    """A user's mistake: on its own it leaves a line and nothing else, in a sweep a record."""
    print_refusal(error)
    if not job.in_sweep:
        if folder is not None:
            shutil.rmtree(folder)
        return JobOutcome("refused")
    folder = folder or make_folder(job.base, folder_name(job.config, job.choices))
    _record(folder, job, "refused", str(error))
    return JobOutcome("refused", folder)


def _has_begun(folder: Path) -> bool:
    """Whether the run's recorder has started; from then on it keeps the record, whatever happens."""
    return (folder / REQUESTS_FILE).exists()


def _record(folder: Path, job: Job, status: Status, reason: str) -> None:
    config = dataclasses.asdict(job.config)
    info = RunInfo(job.config.name, job.choices, config, collect_provenance(), utc_now())
    write_status(folder, info, status, reason)
