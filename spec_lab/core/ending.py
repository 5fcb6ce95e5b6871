"""The ending of every program of the lab: 0 finished, 1 failed, 2 refused, 130 interrupted."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from spec_lab.core.errors import Breakdown, UserError


def ended(run: Callable[[], int | None]) -> int:
    """Return the exit code of `run()`, where None counts as 0. What it refuses, and an interruption, give a line each.

    Any other exception is left to Python, whose exit code is 1.
    """
    try:
        return run() or 0
    except (UserError, Breakdown) as error:
        print_error(error)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def print_error(error: BaseException) -> None:
    """Print an error on stderr: a refusal and a breakdown by their message, any other with its traceback."""
    if isinstance(error, (UserError, Breakdown)):
        print("refused:" if isinstance(error, UserError) else "failed:", error, file=sys.stderr)
    else:
        traceback.print_exception(error)


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a program as a process, in which SIGTERM is the same as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
