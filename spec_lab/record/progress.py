"""Progress on stderr by tqdm: a bar on a terminal and in a notebook; elsewhere a line at most every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """Counts steps of a known total: `with Progress(total, "request") as progress: progress.stage("plain")`."""

    def __init__(self, total: int, unit: str) -> None:
        from tqdm.auto import tqdm

        seconds = 0.1 if sys.stderr.isatty() or "ipykernel" in sys.modules else 10
        self._bar = tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True, mininterval=seconds)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.close()

    def stage(self, name: str) -> None:
        """Show the name of the stage that begins."""
        self._bar.set_description(name)

    def counted(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """Begin the stage `name` and yield its items."""
        for num_done, item in enumerate(items):
            self._bar.set_description(f"{name}, {num_done} of {len(items)}", refresh=num_done == 0)
            yield item

    def advance(self) -> None:
        """Count a finished step."""
        self._bar.update()
