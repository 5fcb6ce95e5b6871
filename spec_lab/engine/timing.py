"""Stage timers measure spans inside a round. They do not overlap; a stage's time is the sum of its spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch


class HostTimer:
    """Takes the wall clock around each span: right on a CPU, where a call returns when its work is done.

    A replay runs no Python, so the spans inside a captured segment are not seen: the segment is timed as a whole.
    """

    def __init__(self) -> None:
        self.spans: dict[str, float] = {}
        self._is_capturing = False

    @contextmanager
    def round(self, num_rounds: int = 1) -> Iterator[None]:
        self.spans = {}
        yield

    def inner_round(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def unmarked(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        if not self._is_capturing:
            self.spans[name] = self.spans.get(name, 0.0) + perf_counter() - start

    def reading(self) -> AbstractContextManager[None]:
        return self.span("readback")

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

    def collect(self, spans: dict[str, float], num_rounds: int = 1) -> list[dict[str, float]]:
        shares = {name: seconds / num_rounds for name, seconds in spans.items()}
        return [dict(shares) for _ in range(num_rounds)]


@dataclass(frozen=True, slots=True)
class EventPair:
    """The start and the end of a span on the stream; `round_index` is None where it is no single round's."""

    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    round_index: int | None = None


class CudaEventTimer:
    """Records events on the stream around each span, read only in `collect`, so that no span waits for the device.

    Inside a graph they are external events: nodes of the graph that each replay records anew. So they are to be read
    before this graph is replayed again.
    """

    def __init__(self) -> None:
        self.spans: list[EventPair] = []
        self._marks: list[EventPair] | None = None
        self._round_index: int | None = None
        self._is_unmarked = False

    @contextmanager
    def round(self, num_rounds: int = 1) -> Iterator[None]:
        self.spans = []
        yield

    @contextmanager
    def inner_round(self, index: int) -> Iterator[None]:
        self._round_index = index
        try:
            yield
        finally:
            self._round_index = None

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        was_unmarked, self._is_unmarked = self._is_unmarked, True
        try:
            yield
        finally:
            self._is_unmarked = was_unmarked

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self._is_unmarked:
            yield
            return
        is_external = self._marks is not None
        start, end = (torch.cuda.Event(enable_timing=True, external=is_external) for _ in range(2))
        start.record()
        yield
        end.record()
        pair = EventPair(name, start, end, self._round_index)
        (self.spans if self._marks is None else self._marks).append(pair)

    def reading(self) -> AbstractContextManager[None]:
        """The device has nothing to do meanwhile; an event behind the reading would be one more to wait for."""
        return nullcontext()

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
        self.spans.extend(marks)

    def collect(self, spans: list[EventPair], num_rounds: int = 1) -> list[dict[str, float]]:
        """A stage of which a span cannot be read is left out: no time rather than a wrong one."""
        if spans:
            spans[-1].end.synchronize()  # the last one that was recorded, so the others are there too
        rounds = [StageSeconds() for _ in range(num_rounds)]
        for pair in spans:
            if pair.round_index is None:
                took = _elapsed_seconds(pair)
                for part in rounds:
                    part.add(pair.name, None if took is None else took / num_rounds)
            elif pair.round_index < num_rounds:
                rounds[pair.round_index].add(pair.name, _elapsed_seconds(pair))
        return [part.known() for part in rounds]


class StageSeconds:
    """Sums the spans of a round by stage."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._unknown: set[str] = set()

    def add(self, name: str, seconds: float | None) -> None:
        """Add a span; `seconds` are None where it could not be read."""
        if seconds is None:
            self._unknown.add(name)
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def known(self) -> dict[str, float]:
        return {name: seconds for name, seconds in self._seconds.items() if name not in self._unknown}


def _elapsed_seconds(pair: EventPair) -> float | None:
    """Return the time between two events; None where one was not recorded, or is older than its partner."""
    try:
        took = pair.start.elapsed_time(pair.end) / 1e3
    except (RuntimeError, ValueError):
        return None
    return took if took >= 0 else None


def make_timer(device: torch.device) -> HostTimer | CudaEventTimer:
    """Make the timer of a device: events on a GPU, the host's clock elsewhere."""
    return CudaEventTimer() if device.type == "cuda" else HostTimer()
