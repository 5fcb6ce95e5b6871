"""The ending of every program of the lab: an exit code, and a one-line message for errors that are not bugs.

    def main(arguments: Sequence[str] | None = None) -> int:
        return guarded(lambda: _run(sys.argv[1:] if arguments is None else arguments))

`guarded` handles the exceptions that `_run` raises. A `UserError`, an error of Hydra's, an unreadable file or too
little memory gives one line and exit code 2. A `Breakdown`, a full disk or a similar state of the machine gives one
line and code 1. A signal that `Interrupts` handles gives code 130, even if an error follows it. An error that
`trouble_of` does not know counts as a bug and gives a traceback and code 1. So `_run` only catches errors to which it
can add the name of a knob: `except OSError as error: raise UserError(f"output_dir={folder} ...
({describe_os_error(error)}); ...") from error`.

A multirun goes on after an error of one job. A training then returns the status of `print_trouble`. A run
(`cli.job`) calls `explained` and `print_ending`, since it also records the error.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spec_lab.core.errors import Trouble, UserError, behind, is_interruption, is_of_composing, one_line, trouble_of
from spec_lab.program.console import patient_console, raise_lost
from spec_lab.program.interrupts import Interrupts

if TYPE_CHECKING:
    from spec_lab.program.options import Menu
    from spec_lab.record.recorder import Status

EXIT_CODES: dict[Status, int] = {"finished": 0, "failed": 1, "refused": 2, "interrupted": 130}


def guarded(
    run: Callable[[], int | None], menu: Callable[[], Menu] | None = None, interrupted: str = "interrupted"
) -> int:
    """Return the exit code of `run()`, where None counts as 0. An exception is printed and its code is returned, except
    that SystemExit, as of `--help`, is not caught.

    Args:
        menu: returns the choices of the command line, for remedies if a configuration does not compose; None means the
            choices of a run.
        interrupted: the message for Ctrl-C and SIGTERM.
    """
    status: Status
    interrupts: Interrupts | None = None
    with patient_console():
        try:
            with Interrupts() as interrupts:
                refuse_process()
                code = run()
                if sys.stdout is not None:
                    sys.stdout.flush()
                    raise_lost(sys.stdout)
            if interrupts.seen:
                raise KeyboardInterrupt
            return code or 0
        except KeyboardInterrupt:
            status = "interrupted"
        except Exception as error:
            status = "interrupted" if is_interruption(error) else print_trouble(error, menu and menu())
            if interrupts is not None and interrupts.seen:
                status = "interrupted"
        if status == "interrupted":
            print(interrupted, file=sys.stderr)
        return EXIT_CODES[status]


def refuse_process() -> None:
    """Raise UserError if Python runs without docstrings, or if the working folder was deleted.

    Help and the definitions in records are made from docstrings. In a deleted folder, imports fail with misleading
    errors.
    """
    if sys.flags.optimize > 1:
        raise UserError(
            "python -OO (or PYTHONOPTIMIZE=2) removes the texts that define a record's numbers; use python -O (or "
            "PYTHONOPTIMIZE=1), or neither"
        )
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UserError("the working folder does not exist any more; change into another one (cd)") from error


def leave(code: int) -> NoReturn:
    """End the process with the exit code of `guarded`; after Ctrl-C, without finalising the interpreter.

    Finalising takes seconds with torch and models loaded, and is not needed: records and W&B's run are closed by now,
    and exit functions are called here. A process whose workers still run is finalised nevertheless.
    """
    from multiprocessing import active_children

    if code == EXIT_CODES["interrupted"]:
        # An interrupted import of torch has not set the levels of its loggers, and its exit functions would print.
        logging.disable()
    if code == EXIT_CODES["interrupted"] and not active_children():
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    sys.exit(code)


def print_trouble(error: BaseException, menu: Menu | None = None) -> Status:
    """Print an error on stderr, in a line, or with a traceback for a bug. Return `refused` or `failed`."""
    trouble = explained(error, menu)
    print_ending(error, trouble)
    return "failed" if trouble is None else trouble.status


def print_ending(error: BaseException, trouble: Trouble | None) -> None:
    """Print the line of `trouble` on stderr, or for a bug the traceback of `error`.

    If the traceback passes through an extension, a last line names it.
    """
    if trouble is None:
        from spec_lab.menu.extensions import extension_behind

        traceback.print_exception(error)
        if (extension := extension_behind(error)) is not None:
            print(
                f"failed: the traceback passes through the extension {extension}; look for the mistake there first",
                file=sys.stderr,
            )
    else:
        print(f"{trouble.status}: {one_line(trouble.line)}", file=sys.stderr)


def print_refusal(reason: object) -> None:
    """Print the reason as one line on stderr."""
    print("refused:", one_line(reason), file=sys.stderr)


def explained(error: BaseException, menu: Menu | None = None) -> Trouble | None:
    """Return what an error means for the user or the machine; None if it is a bug.

    If an error of composing wraps a `UserError` or an error of a file, `trouble_of` describes the wrapped one. Other
    errors of composing are described by `program.explain`. `trouble_of` describes those of YAML's parser and the rest.
    """
    if not isinstance(error, Exception) or not is_of_composing(error) or type(error).__module__.startswith("yaml"):
        return trouble_of(error)
    from hydra.errors import HydraException

    # One of Hydra's exceptions is also an OSError.
    others = (cause for cause in behind(error) if not isinstance(cause, HydraException))
    wrapped = next((cause for cause in others if isinstance(cause, UserError) or _is_of_a_file(cause)), None)
    if wrapped is not None:
        return trouble_of(wrapped)
    from spec_lab.program.explain import explain

    return Trouble(explain(error, menu), "refused")


def _is_of_a_file(error: BaseException) -> bool:
    """Return whether it is an error of the operating system, rather than one of OmegaConf's with the same class."""
    return isinstance(error, OSError) and error.errno is not None


class LineParser(argparse.ArgumentParser):
    """Raises errors instead of printing them with the usage, and refuses some input that argparse would accept
    silently."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always, with the message and where to look.
        """
        raise UserError(f"{message}; {self.prog} --help shows all options")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Refuse an empty path, which would mean the working folder."""
        if action.type is Path and not arg_string:
            self.error(f"{'/'.join(action.option_strings) or action.metavar}: an empty text is not a path")
        return super()._get_value(action, arg_string)
