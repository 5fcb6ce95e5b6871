"""Progress on stderr: a bar on a terminal and in a notebook; elsewhere a line for each stage and every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
T = TypeVar("T")


class Progress:
    """Counts steps of a known total: `with Progress(total, "request") as progress: progress.stage("plain")`."""

    def __init__(self, total: int, unit: str, stream: TextIO | None = None) -> None:
        self._total, self._unit, self._stream = total, unit, stream or sys.stderr
        self._done, self._name = 0, ""
        self._started_at = self._said_at = time.perf_counter()
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Progress:
        if in_notebook() or (self._stream is not None and self._stream.isatty()):
            from tqdm.autonotebook import tqdm

            self._bar = tqdm(total=self._total, unit=self._unit, file=self._stream, leave=False, dynamic_ncols=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def stage(self, name: str) -> None:
        """Show the name of the stage that begins."""
        self._name = name
        if self._bar is not None:
            self._bar.set_description(name)
        else:
            self._say()

    def counted(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """Begin the stage `name` and yield its items; lines then say how many are done."""
        self.stage(name)
        for num_done, item in enumerate(items):
            self._name = f"{name}, {num_done} of {len(items)}"
            self._say_at_times()
            yield item
        self._name = name

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)
        else:
            self._say_at_times()

    def _say_at_times(self) -> None:
        if self._bar is None and time.perf_counter() - self._said_at >= SECONDS_BETWEEN_LINES:
            self._say()

    def _say(self) -> None:
        self._said_at = time.perf_counter()
        seconds = self._said_at - self._started_at
        print(
            f"[{seconds:5.1f} s] {self._done}/{self._total} {self._unit}s: {self._name}", file=self._stream, flush=True
        )


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say on stderr that something long begins, where there is no bar."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield


def in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel, without importing anything."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
