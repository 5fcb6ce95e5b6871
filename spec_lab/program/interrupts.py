"""Ctrl-C is not forgotten, whatever swallows it, and SIGTERM ends a run as it does."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from spec_lab.core.ranks import ranks


class Interrupts:
    """Remembers whether Ctrl-C was pressed: `with Interrupts() as interrupts: ...; if interrupts.seen: ...`.

    Python raises KeyboardInterrupt wherever the program stands, and drops it where that is a finaliser or a callback;
    a library may catch it with everything else. SIGTERM raises it too, so that what was decoded is kept; not in the
    processes of torchrun, which may wait for one another. Where a signal is ignored (`nohup`), or somebody else's, or
    outside the main thread, nothing changes.

    Attributes:
        seen: whether it was pressed, or SIGTERM came.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def __enter__(self) -> Interrupts:
        for number in self._watched():
            signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number in self._watched():
            signal.signal(number, self._before[number])

    def _watched(self) -> list[signal.Signals]:
        if threading.current_thread() is not threading.main_thread():
            return []
        ends = self._before[signal.SIGTERM] is signal.SIG_DFL and ranks().size == 1
        presses = callable(self._before[signal.SIGINT])
        return [signal.SIGINT] * presses + [signal.SIGTERM] * ends

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt
