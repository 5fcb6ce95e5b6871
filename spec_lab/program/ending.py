"""Ends every program of the lab: an exit code, and one line where what went wrong is not ours.

    def main(arguments: Sequence[str] | None = None) -> int:
        return guarded(lambda: _run(sys.argv[1:] if arguments is None else arguments))

`guarded` turns what `_run` lets through into an ending. One line and exit code 2: a `UserError`, what Hydra complains
about, a file that cannot be read, too little memory. One line and 1: a full disk. Ctrl-C and SIGTERM: 130. All else is
a mistake of ours: a traceback, and 1. So `_run` catches nothing but what it can add a knob to:
`except OSError as error: raise UserError(f"output_dir={folder} ... ({describe_os_error(error)}); ...") from error`.

A program that goes on after an error, such as a sweep, uses `print_trouble`, and reads the status from it.
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
    from spec_lab.record.schema import Status

EXIT_CODES: dict[Status, int] = {"finished": 0, "failed": 1, "refused": 2, "interrupted": 130}


def guarded(
    run: Callable[[], int | None], menu: Callable[[], Menu] | None = None, interrupted: str = "interrupted"
) -> int:
    """Return the exit code of `run()`, None for 0, or of what it raises, which is printed.

    Args:
        menu: returns what the command line could choose, for the remedies of what does not compose; None is that of a
            run.
        interrupted: what Ctrl-C and SIGTERM are answered with.
    """
    status: Status
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
        if status == "interrupted":
            print(interrupted, file=sys.stderr)
        return EXIT_CODES[status]


def refuse_process() -> None:
    """Raise UserError where nothing can be done right: without docstrings, or in a working folder that was deleted.

    The first are what help shows and what records define their numbers by. In the second, imports fail in ways that
    name something else.
    """
    if sys.flags.optimize > 1:
        raise UserError("python -OO takes away the texts that define a record's numbers; use python -O, or neither")
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UserError("the working folder is not there any more; change into one that is (cd)") from error


def leave(code: int) -> NoReturn:
    """End the process with the exit code of `guarded`, after Ctrl-C without taking the interpreter apart.

    That takes seconds once torch and the models are in it, and nothing is left to wait for: records and W&B's run were
    closed on the way here, and the exit functions are called. Workers of a launcher are ended in the usual way.
    """
    from multiprocessing import active_children

    if code == EXIT_CODES["interrupted"]:
        logging.disable()  # an interrupted import of torch leaves exit functions that log, and loggers without levels
    if code == EXIT_CODES["interrupted"] and not active_children():
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    sys.exit(code)


def print_trouble(error: BaseException, menu: Menu | None = None) -> Status:
    """Say what went wrong on stderr, in a line or, of a mistake of ours, with a traceback; `refused` or `failed`."""
    trouble = explained(error, menu)
    print_ending(error, trouble)
    return "failed" if trouble is None else trouble.status


def print_ending(error: BaseException, trouble: Trouble | None) -> None:
    """Print the line of `trouble`, or, of a mistake in code, the traceback of `error` and whose it is, on stderr."""
    if trouble is None:
        from spec_lab.menu.extensions import extension_behind

        traceback.print_exception(error)
        if (extension := extension_behind(error)) is not None:
            print(f"failed: this is code of the extension {extension}, not the lab's; mend it there", file=sys.stderr)
    else:
        print(f"{trouble.status}: {one_line(trouble.line)}", file=sys.stderr)


def print_refusal(reason: object) -> None:
    """Print one line on stderr, whatever the reason looks like."""
    print("refused:", one_line(reason), file=sys.stderr)


def explained(error: BaseException, menu: Menu | None = None) -> Trouble | None:
    """Say what `trouble_of` does, past Hydra's wrapping, with the remedy where a configuration does not compose."""
    if not isinstance(error, Exception) or not is_of_composing(error) or type(error).__module__.startswith("yaml"):
        return trouble_of(error)
    from hydra.errors import HydraException

    others = (cause for cause in behind(error) if not isinstance(cause, HydraException))  # one of Hydra's is an OSError
    wrapped = next((cause for cause in others if isinstance(cause, UserError) or _is_of_a_file(cause)), None)
    if wrapped is not None:
        return trouble_of(wrapped)
    from spec_lab.program.explain import explain

    return Trouble(explain(error, menu), "refused")


def _is_of_a_file(error: BaseException) -> bool:
    """Tell an error of the operating system from what OmegaConf raises of the same class about contents."""
    return isinstance(error, OSError) and error.errno is not None


class LineParser(argparse.ArgumentParser):
    """Raises what argparse would print below the usage, which `--help` shows, and what it would take in silence."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always, with the message and where to look.
        """
        raise UserError(f"{message}; {self.prog} --help shows what there is")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Refuse an empty path, which would be the working folder."""
        if action.type is Path and not arg_string:
            self.error(f"{'/'.join(action.option_strings) or action.metavar}: an empty text is no path")
        return super()._get_value(action, arg_string)
