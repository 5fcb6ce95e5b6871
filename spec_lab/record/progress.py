"""Progress on stderr: a bar on a terminal and in a notebook, a line a stage elsewhere, so that logs stay short."""

from __future__ import annotations

import sys
import time
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm


class Progress:
    """Counts steps of a known total: `with Progress(total, "request") as progress: progress.stage("plain")`.

    Nothing is drawn between `advance` calls, so that no thread runs beside a timed stretch.
    """

    def __init__(self, total: int, unit: str, stream: TextIO | None = None) -> None:
        self._total = total
        self._unit = unit
        self._stream = stream or sys.stderr
        self._done = 0
        self._started_at = time.perf_counter()
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> Progress:
        if in_notebook():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # without ipywidgets the bar is one of text, which nobody need be told
                from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, unit=self._unit, leave=False)
        elif self._stream.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0
            self._bar = tqdm(total=self._total, unit=self._unit, file=self._stream, dynamic_ncols=True, leave=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def stage(self, name: str) -> None:
        """Say what comes next."""
        if self._bar is not None:
            self._bar.set_description(name)
            return
        seconds = time.perf_counter() - self._started_at
        print(f"[{seconds:5.1f} s] {self._done}/{self._total} {self._unit}s: {name}", file=self._stream, flush=True)

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)


def in_notebook() -> bool:
    """Tell whether a kernel of Jupyter runs this; nothing is imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
