"""Remembers Ctrl-C, and in a run of one process SIGTERM, even where a library swallows the KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from spec_lab.core.ranks import ranks

DEFAULTS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
SECONDS_TO_WAIT = 0.02
"""How long a signal that came during a finaliser (`__del__`) waits before it is raised again."""


def end_at_signals() -> None:
    """Make Ctrl-C and SIGTERM end the process at once, with a line and exit code 130.

    This serves while a program imports, since there is nothing to close yet. Then `Interrupts` takes over. A signal
    that is ignored (`nohup`), or that another library handles, stays as it is. If an import fails because a file of the
    working folder hides a library, the process also ends with a line.
    """
    sys.excepthook = _explain
    for number, default in DEFAULTS.items():
        if signal.getsignal(number) is default:
            signal.signal(number, _end)


def take_signals_over() -> None:
    """Undo `end_at_signals`, which only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, default in DEFAULTS.items():
        if signal.getsignal(number) is _end:
            signal.signal(number, default)


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    from spec_lab.core.hidden import hidden_library

    if (hidden := hidden_library(error)) is None:
        sys.__excepthook__(kind, error, trace)
        return
    print("refused:", hidden, file=sys.stderr)
    sys.exit(2)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)


class Interrupts:
    """Remembers whether Ctrl-C was pressed: `with Interrupts() as interrupts: ...; if interrupts.seen: ...`.

    Python raises KeyboardInterrupt at any point of the program. It drops the exception in callbacks and in finalisers
    (`__del__`), and a library may catch it. Garbage collection runs many finalisers. A signal that comes during a
    finaliser is raised again until no finaliser is running.

    SIGTERM raises KeyboardInterrupt too, so that decoded requests are kept. In a run of several ranks it does not,
    since they may wait for one another. A signal that is ignored (`nohup`) stays ignored. A handler of another library
    still gets its signal. Outside the main thread no signal is noted. Of two `Interrupts`, one inside the other, both
    see the signal.

    Attributes:
        seen: whether a signal was noted.
    """

    def __init__(self) -> None:
        self.seen = self._watches = False
        self._again: threading.Timer | None = None
        take_signals_over()
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def __enter__(self) -> Interrupts:
        for number in self._watched():
            signal.signal(number, self._note)
        self._watches = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        is_pending = self._again is not None and self._again.is_alive()
        if self._again is not None:
            self._again.cancel()
            self._again.join()  # if it fires now, our handler is still set
        self._watches = False
        for number in self._watched():
            signal.signal(number, self._before[number])
        if is_pending and error is None:
            raise KeyboardInterrupt

    def _watched(self) -> list[signal.Signals]:
        if threading.current_thread() is not threading.main_thread():
            return []
        before = self._before[signal.SIGTERM]
        is_ours = getattr(before, "__func__", None) is Interrupts._note
        ends = is_ours or (before is signal.SIG_DFL and ranks().size == 1)
        presses = callable(self._before[signal.SIGINT])
        return [signal.SIGINT] * presses + [signal.SIGTERM] * ends

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen, before = True, self._before[signal.Signals(number)]
        if _is_in_a_finaliser(frame):
            self._again = threading.Timer(SECONDS_TO_WAIT, self._strike_again, [number])
            self._again.start()
        elif callable(before):
            before(number, frame)
        else:
            raise KeyboardInterrupt

    def _strike_again(self, number: int) -> None:
        main = threading.main_thread().ident
        if self._watches and main is not None:
            signal.pthread_kill(main, number)


def _is_in_a_finaliser(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
