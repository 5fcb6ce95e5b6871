"""Runs one composed run: checks it, runs it, and records it in its folder."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spec_lab.core.errors import Trouble, UserError, describe_error, is_interruption, is_out_of_memory
from spec_lab.core.regular import regular_text
from spec_lab.menu import registry
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.run import admit, refusals, refuse_name
from spec_lab.program.dry_run import describe
from spec_lab.program.ending import EXIT_CODES, explained, print_ending
from spec_lab.program.folder import folder_name, full_disk, make_folder, missing_folders, remove_empty
from spec_lab.program.interrupts import Interrupts
from spec_lab.record.recorder import (
    REQUESTS_FILE,
    STILL_RUNNING,
    SUMMARY_FILE,
    Status,
    amend,
    begun,
    ended,
    write_run,
)


LOADING = "it was killed while its models were loaded"


def worst_exit_code(statuses: Iterable[Status]) -> int:
    """Return the exit code of the worst of several jobs; a failure is worse than a refusal."""
    ended = set(statuses)
    return next((EXIT_CODES[status] for status in ("failed", "refused") if status in ended), 0)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The outcome of a job.

    Attributes:
        folder: None if there is none, for instance after a dry run or a refused single run.
        reason: why the job failed or was refused; None if unknown, or if it finished.
        earlier: whether it ended in an earlier call, and was not run again.
    """

    status: Status
    folder: Path | None = None
    reason: str | None = None
    earlier: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A composed run, which is checked, run and recorded.

    Attributes:
        choices: the name of each group's choice (`program.labels`).
        base: folder in which the job makes its own folder.
        in_sweep: whether it is one of several, in which case a refusal is recorded too.
    """

    config: RunConfig
    choices: dict[str, str]
    base: Path
    in_sweep: bool


def run_job(job: Job) -> JobOutcome:
    """Check, run and record a job. Its errors become part of the outcome; only Ctrl-C and SIGTERM are raised again, so
    that they also end a sweep."""
    missing = missing_folders(job.base)
    with Interrupts() as interrupts:
        outcome = _run(job)
    if outcome.folder is None:
        remove_empty(missing)
    if interrupts.seen:
        raise KeyboardInterrupt
    return outcome


def _run(job: Job) -> JobOutcome:
    folder = None
    try:
        if job.config.dry_run:
            return _dry_run(job)
        chosen = admit(job.config)
        folder = begin(job)
        from spec_lab.measure.runner import run

        run(chosen, job.choices, folder)
    except (Exception, KeyboardInterrupt) as error:
        if is_interruption(error):
            close_record(folder, "interrupted", "KeyboardInterrupt")
            raise KeyboardInterrupt from error
        outcome, trouble = end(job, folder, error)
        print_ending(error, trouble)
        return outcome
    return JobOutcome("finished", folder)


def begin(job: Job) -> Path:
    """Make the folder of a job that may start, with a record that says that the job has not ended.

    Raises:
        UserError: the folder cannot be made.
        OSError: the disk is full.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler; torch reads it when it loads
    return _make_folder(job, "interrupted", LOADING)


def _dry_run(job: Job) -> JobOutcome:
    refused = refusals(job.config)
    print(describe(job.config, job.choices, refused))
    return JobOutcome("refused" if refused else "finished")


def end(job: Job, folder: Path | None, error: BaseException) -> tuple[JobOutcome, Trouble | None]:
    """Record the error that ended the job. Return the outcome and the error in a line, which is None for a bug.

    A bug of the lab and a full disk are failures, and so is every error after the run has begun. Before that, an error
    that the user can mend is a refusal.
    """
    if folder is not None and isinstance(error, OSError) and not folder.is_dir():
        gone = f"{folder} was moved or deleted while the run wrote to it; leave it there, and type the run again"
        return JobOutcome("failed", reason=gone), Trouble(gone, "failed")
    has_begun = folder is not None and (folder / REQUESTS_FILE).exists()
    trouble = _trouble(job, error, has_begun)
    if trouble is not None and trouble.status == "refused":
        return _refused(job, folder, trouble.line), trouble
    reason = describe_error(error)
    close_record(folder, "failed", reason)
    return JobOutcome("failed", folder, reason), trouble


def _trouble(job: Job, error: BaseException, has_begun: bool) -> Trouble | None:
    if (reason := full_disk(job.config.output_dir, error)) is not None:
        return Trouble(reason, "failed")
    if not has_begun:
        return explained(error)
    is_not_ours = isinstance(error, (OSError, UserError)) or is_out_of_memory(error)
    trouble = explained(error) if is_not_ours else None
    return None if trouble is None else Trouble(trouble.line, "failed")


def _refused(job: Job, folder: Path | None, reason: str) -> JobOutcome:
    """End a job after a user's mistake: a single run leaves no folder, a job of a sweep leaves a record if it can."""
    if not job.in_sweep:
        if folder is not None:
            shutil.rmtree(folder)
        return JobOutcome("refused", reason=reason)
    with suppress(UserError, OSError):  # if the folder cannot be written, this job or the next one says so elsewhere
        if folder is not None:
            amend(folder, "refused", reason)
        elif refuse_name(job.config.name) is None:
            folder = _make_folder(job, "refused", reason)
    return JobOutcome("refused", folder, reason)


def _make_folder(job: Job, status: Status, reason: str) -> Path:
    """Make the job's folder, with the first record in it."""
    info = begun(dataclasses.asdict(job.config), job.choices, registry.load(job.config.extensions).origins())
    name = folder_name(job.config, job.choices)
    return make_folder(job.base, name, lambda folder: write_run(folder, ended(info, status, reason)))


def close_record(folder: Path | None, status: Status, reason: str) -> None:
    """Write how the run ended into a record that still says it is loading or running. Usually the recorder has done
    this already."""
    if folder is None:
        return
    with suppress(OSError):  # the disk is completely full, and the existing record is valid too
        summary = json.loads(regular_text(folder / SUMMARY_FILE))
        if summary["reason"] in (LOADING, STILL_RUNNING):
            amend(folder, status, reason)
