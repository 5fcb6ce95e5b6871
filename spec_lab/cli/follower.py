"""Ranks other than the first, which do the same as the first but keep no records and print only errors of their own.

They have the same command line. Their records go into a temporary folder, and other output is discarded.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from tempfile import TemporaryDirectory

from spec_lab.core.errors import UserError
from spec_lab.core.ranks import ranks
from spec_lab.menu.config import LoggerConfig, RunConfig
from spec_lab.program.ending import EXIT_CODES, print_refusal

Adapt = Callable[[RunConfig], RunConfig]
"""A function that changes a composed run before it starts."""
GRACE_SECONDS = 10.0
"""How long a rank with an error waits before it ends. If the first rank has the same error, torchrun ends it sooner."""


def on_this_rank(run: Callable[[Adapt], int]) -> int:
    """Return the exit code of `run(adapt)`, a program that passes each composed run through `adapt`. Before it starts,
    wrong variables of `torchrun` are refused.

    After an error, a rank other than the first waits `GRACE_SECONDS` and then prints all of its output on stderr.
    """
    try:
        rank = ranks().rank
    except UserError as error:
        print_refusal(error)
        return EXIT_CODES["refused"]
    if rank == 0:
        return run(lambda config: config)
    said = io.StringIO()
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch, redirect_stdout(said), redirect_stderr(said):
        code = run(partial(_without_records, scratch=scratch))
    if code not in (EXIT_CODES["finished"], EXIT_CODES["interrupted"]):
        time.sleep(GRACE_SECONDS)
        print(f"rank {rank}: {said.getvalue().rstrip()}", file=sys.stderr)
    return code


def _without_records(config: RunConfig, scratch: str) -> RunConfig:
    return dataclasses.replace(config, output_dir=scratch, logger=LoggerConfig(name="jsonl"))
