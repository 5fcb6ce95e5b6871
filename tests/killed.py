"""Commands of the lab, each in a process of its own that kills itself around its n-th change to a file.

The processes are forked from a server that has imported everything, so that a kill costs no start of Python, and none
falls into an import. What the runs record is made up, and depends on their configuration alone.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import composed, recorded_runner

IMPORTED = ("matplotlib.figure", "seaborn", "spec_lab.__main__")
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate")
SECONDS_TO_END = 120


@dataclass(frozen=True, slots=True)
class Moment:
    """When a process dies: `calls` calls of C functions after it is about to change a file for the `change`-th time.

    With 0 calls the change is not made; a few later a file is open and empty, or holds a part; many later, lines stand
    in it and more would follow.
    """

    change: int
    calls: int


@dataclass(frozen=True, slots=True)
class Command:
    """What is typed: `python -m program arguments`, in a working directory."""

    program: str
    arguments: tuple[str, ...]

    def start(self, folder: Path, death: Moment | None) -> Any:
        """A process that runs the command in `folder`, and kills itself at the moment of its death."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *IMPORTED])
        process = context.Process(target=_run, args=(self.program, self.arguments, str(folder), death))
        process.start()
        return process


def end_of(process: Any) -> int:
    """The exit code, -9 of one that was killed."""
    process.join(SECONDS_TO_END)
    assert process.exitcode is not None, "it hangs"
    return int(process.exitcode)


def _run(program: str, arguments: Sequence[str], folder: str, death: Moment | None) -> None:
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    recorded_runner.install()
    composed.install()
    if death is not None:
        sys.addaudithook(_Killer(death))
    code = importlib.import_module(program).main(list(arguments))
    sys.stdout.flush()
    os._exit(code)


class _Killer:
    """An audit hook that counts what changes a file, and from the last one on a profiler that counts calls."""

    def __init__(self, death: Moment) -> None:
        self._changes_left = death.change
        self._calls_left = death.calls

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and _writes(arguments)):
            self._changes_left -= 1
            if self._changes_left == 0:
                self._die_if_due()
                sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            self._calls_left -= 1
            self._die_if_due()

    def _die_if_due(self) -> None:
        if self._calls_left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
