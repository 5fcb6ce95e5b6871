"""Progress on stderr by tqdm: a bar on a terminal and in a notebook; elsewhere a line at most every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def progress_of(total: int) -> tqdm:
    """Return a bar for so many requests."""
    seconds = 0.1 if sys.stderr.isatty() or "ipykernel" in sys.modules else 10
    return tqdm(total=total, unit="request", leave=False, dynamic_ncols=True, mininterval=seconds)


def counted(progress: tqdm, name: str, items: Sequence[T]) -> Iterator[T]:
    """Begin the stage `name` and yield its items."""
    for num_done, item in enumerate(items):
        progress.set_description(f"{name}, {num_done} of {len(items)}", refresh=num_done == 0)
        yield item
