"""Runs one of a list of runs, each in its own folder, unless it has ended before; locks the folder of the list."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spec_lab.cli.job import Job, JobOutcome, run_job
from spec_lab.core.errors import UserError
from spec_lab.options.loggers import join_sweep
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import print_refusal
from spec_lab.program.folder import display, find_ended, folder_name, make_output_dir, reopen_sweep
from spec_lab.program.ground import Ground, keep_ground
from spec_lab.program.sweep_lock import SweepLock


@contextmanager
def held_sweep(folder: Path, ground: Ground) -> Iterator[None]:
    """Make the folder of a list, and hold its lock while the list runs.

    Raises:
        UserError: the folder cannot be written, or another process runs this list.
    """
    make_output_dir(folder)
    lock = SweepLock(folder)
    lock.take()
    reopen_sweep(folder)
    keep_ground(folder, ground)
    try:
        yield
    finally:
        lock.release()


def run_listed(number: int, overrides: Sequence[str], folder: Path) -> JobOutcome:
    """Run the configuration that `overrides` compose, in `folder`/NUMBER, counted from 1, unless it has ended there
    before.

    Each has its own folder, since a list may have the same run twice.
    """
    print(f"[{number}] {shlex.join(overrides)}", flush=True)
    try:
        config, choices = compose_run(overrides)
    except UserError as error:
        print_refusal(error)
        return JobOutcome("refused", reason=str(error))
    join_sweep(config.logger, folder.name)
    base = folder / f"{number:03d}"
    ended = find_ended(base, folder_name(config, choices))
    if ended is None:
        return run_job(Job(config, choices, base, in_sweep=True))
    place, status = ended
    print(f"{status} before: {display(place.absolute())}")
    return JobOutcome(status, place, earlier=True)
