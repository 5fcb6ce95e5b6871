"""Stage timers measure spans inside a round. They do not overlap; a stage's time is the sum of its spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch


class HostTimer:
    """Takes the wall clock around each span: right on a CPU, where a call returns when its work is done.

    A replay runs no Python, so the spans inside a captured segment are not seen: the segment is timed as a whole.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._is_capturing = False

    @contextmanager
    def round(self) -> Iterator[None]:
        self._seconds.clear()
        yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        if not self._is_capturing:
            self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - start

    @contextmanager
    def capture(self) -> Iterator[list[EventPair]]:
        self._is_capturing = True
        try:
            yield []
        finally:
            self._is_capturing = False

    @contextmanager
    def replay(self, name: str, marks: list[EventPair]) -> Iterator[None]:
        with self.span(name):
            yield

    def collect(self) -> dict[str, float]:
        return dict(self._seconds)


@dataclass(frozen=True, slots=True)
class EventPair:
    """Holds the start and the end of a span on the stream."""

    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaEventTimer:
    """Records events on the stream around each span, read only in `collect`, so that no span waits for the device.

    Inside a graph they are external events: nodes of the graph that each replay records anew.
    """

    def __init__(self) -> None:
        self._pairs: list[EventPair] = []
        self._marks: list[EventPair] | None = None

    @contextmanager
    def round(self) -> Iterator[None]:
        self._pairs.clear()
        yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        is_external = self._marks is not None
        start, end = (torch.cuda.Event(enable_timing=True, external=is_external) for _ in range(2))
        start.record()
        yield
        end.record()
        (self._pairs if self._marks is None else self._marks).append(EventPair(name, start, end))

    @contextmanager
    def capture(self) -> Iterator[list[EventPair]]:
        marks: list[EventPair] = []
        self._marks = marks
        try:
            yield marks
        finally:
            self._marks = None

    @contextmanager
    def replay(self, name: str, marks: list[EventPair]) -> Iterator[None]:
        """A segment of one stage is timed from outside: replayed again in a round, its marks would be overwritten."""
        if {mark.name for mark in marks} <= {name}:
            with self.span(name):
                yield
            return
        yield
        self._pairs.extend(marks)

    def collect(self) -> dict[str, float]:
        """A stage of which a span cannot be read is left out: no time rather than a wrong one."""
        seconds: dict[str, float] = {}
        unknown = set()
        for pair in self._pairs:
            took = _elapsed_seconds(pair)
            if took is None:
                unknown.add(pair.name)
            else:
                seconds[pair.name] = seconds.get(pair.name, 0.0) + took
        return {name: value for name, value in seconds.items() if name not in unknown}


def _elapsed_seconds(pair: EventPair) -> float | None:
    """Return the time between two events; None where one was not recorded, or is older than its partner."""
    pair.end.synchronize()
    try:
        took = pair.start.elapsed_time(pair.end) / 1e3
    except (RuntimeError, ValueError):
        return None
    return took if took >= 0 else None


def make_timer(device: torch.device) -> HostTimer | CudaEventTimer:
    return CudaEventTimer() if device.type == "cuda" else HostTimer()
