"""Ctrl-C is not forgotten, whatever swallows it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """Remembers whether Ctrl-C was pressed: `with Interrupts() as interrupts: ...; if interrupts.seen: ...`.

    Python raises KeyboardInterrupt wherever the program stands, and drops it where that is a finaliser or a callback;
    a library may catch it with everything else. Where Ctrl-C is ignored (`nohup`) or outside the main thread, nothing
    changes.

    Attributes:
        seen: whether it was pressed.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Interrupts:
        self._install(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._install(self._before)

    def _install(self, handler: signal._HANDLER) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and callable(self._before):
            signal.signal(signal.SIGINT, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        assert callable(self._before)
        self._before(number, frame)
