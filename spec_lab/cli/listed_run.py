"""Runs one of a list of runs, each in a folder of its own, or finds how it ended before."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from spec_lab.cli.job import Job, JobOutcome, run_job
from spec_lab.core.errors import UserError
from spec_lab.options.loggers import join_sweep
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import print_refusal
from spec_lab.program.folder import display, find_ended, folder_name
from spec_lab.program.mixed import MixNote


def run_listed(number: int, overrides: Sequence[str], folder: Path, mix: MixNote) -> JobOutcome:
    """Run what `overrides` say in `folder`/NUMBER, counted from 1, unless it has ended there before.

    Each has a folder of its own, since two of a list may be the same run.
    """
    print(f"[{number}] {shlex.join(overrides)}", flush=True)
    try:
        config, choices = compose_run(overrides)
    except UserError as error:
        print_refusal(error)
        return JobOutcome("refused", reason=str(error))
    mix.see(config)
    join_sweep(config.logger, folder.name)
    base = folder / f"{number:03d}"
    ended = find_ended(base, folder_name(config, choices))
    if ended is None:
        return run_job(Job(config, choices, base, in_sweep=True))
    place, status = ended
    print(f"{status} before: {display(place.absolute())}")
    return JobOutcome(status, place, earlier=True)
