"""Progress on stderr: a bar on a terminal and in a notebook; elsewhere a line for each stage and every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
T = TypeVar("T")


class Progress:
    """Counts steps of a known total: `with Progress(total, "request") as progress: progress.stage("plain")`.

    A thread wakes every ten seconds, also in timed parts. It refreshes the bar, or prints that the run is going on.
    """

    def __init__(
        self, total: int, unit: str, stream: TextIO | None = None, seconds: float = SECONDS_BETWEEN_LINES
    ) -> None:
        self._total = total
        self._unit = unit
        self._stream = stream or sys.stderr
        self._done = 0
        self._started_at = time.perf_counter()
        self._bar: tqdm[None] | None = None
        self._name = ""
        self._beats = Beats(self._go_on, seconds)

    def __enter__(self) -> Progress:
        if in_notebook():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # without ipywidgets the bar is a text bar, without need for a warning
                from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, unit=self._unit, leave=False)
        elif self._stream is not None and self._stream.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0
            self._bar = tqdm(total=self._total, unit=self._unit, file=self._stream, dynamic_ncols=True, leave=False)
        self._beats.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._beats.__exit__(kind, error, None)
        if self._bar is not None:
            self._bar.close()

    def stage(self, name: str) -> None:
        """Show the name of the stage that begins."""
        self._name = name
        if self._bar is not None:
            self._bar.set_description(name)
            return
        self._print(name)
        self._beats.restart()

    def counted(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """Begin the stage `name` and yield its items; progress lines then say how many are done."""
        self.stage(name)
        for num_done, item in enumerate(items):
            self._name = f"{name}, {num_done} of {len(items)}"
            yield item
        self._name = name

    def _go_on(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
        else:
            self._print(f"{self._name}, goes on")

    def _print(self, what: str) -> None:
        if self._stream is None:  # a process without a standard error
            return
        seconds = time.perf_counter() - self._started_at
        print(f"[{seconds:5.1f} s] {self._done}/{self._total} {self._unit}s: {what}", file=self._stream, flush=True)

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)


class Beats:
    """Calls `beat` at intervals from a separate thread: `with Beats(beat): ...`.

    A thread is needed, since a single operation in C may take longer than an interval and does not respond to signals.
    The thread sleeps between calls.
    """

    def __init__(self, beat: Callable[[], None], seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self._beat = beat
        self._seconds = seconds
        self._changed = threading.Condition()
        self._ends = False
        self._restarts = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()

    def restart(self) -> None:
        """Restart the interval, since something was just printed."""
        with self._changed:
            self._restarts = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._ends:
                self._restarts = False
                self._changed.wait(self._seconds)
                if not (self._ends or self._restarts):
                    self._beat()


@contextmanager
def said_to_go_on(what: str, seconds: float = SECONDS_BETWEEN_LINES) -> Iterator[None]:
    """Print on stderr at intervals that the block is still running, with the elapsed seconds. A short block prints
    nothing."""
    began = time.perf_counter()

    def say() -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {what}", file=sys.stderr, flush=True)

    with Beats(say, seconds):
        yield


def in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel, without importing anything."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
