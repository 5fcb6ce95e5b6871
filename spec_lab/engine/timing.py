"""Stage timers: they measure spans inside a round. A stage's time is the sum of its spans.

The stages of a round do not overlap. In a round, a drafter's own spans, such as `head`, lie within that of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import isnan, nan
from time import perf_counter

import torch


class _Unmarkable:
    """Remembers whether spans are left out at the moment."""

    _is_unmarked = False

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        was_unmarked, self._is_unmarked = self._is_unmarked, True
        try:
            yield
        finally:
            self._is_unmarked = was_unmarked


class HostTimer(_Unmarkable):
    """Measures each span by the wall clock. This suits a CPU, where a call returns when its work is done.

    A replay enters no span, so it is timed as a whole, without the spans inside the captured segment.
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

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        if not (self._is_capturing or self._is_unmarked):
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
    """The start and end events of a span; `round_index` is None if the span belongs to no single round."""

    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    round_index: int | None = None


class CudaEventTimer(_Unmarkable):
    """Records events on the stream around spans. Only `collect` reads them, so no span waits for the device.

    Inside a graph they are external events: graph nodes that each replay records again. So they must be read before the
    same graph is replayed again.
    """

    def __init__(self) -> None:
        self.spans: list[EventPair] = []
        self._marks: list[EventPair] | None = None
        self._round_index: int | None = None

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
        """Record no events: other spans already time the work that the host waits for."""
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
        """Time a segment of one stage or none from outside, since another replay in the round overwrites its marks."""
        if {mark.name for mark in marks} <= {name}:
            with self.span(name):
                yield
            return
        yield
        self.spans.extend(marks)

    def collect(self, spans: list[EventPair], num_rounds: int = 1) -> list[dict[str, float]]:
        """Return the times by stage. A stage with an unreadable span is left out, since its time would be wrong."""
        if spans:
            spans[-1].end.synchronize()  # the last recorded event, so all others are complete too
        rounds: list[dict[str, float]] = [{} for _ in range(num_rounds)]
        for pair in spans:
            is_shared, index = pair.round_index is None, pair.round_index or 0
            seconds = _elapsed_seconds(pair) / (num_rounds if is_shared else 1)
            for part in rounds if is_shared else rounds[index : index + 1]:
                part[pair.name] = part.get(pair.name, 0.0) + seconds
        return [{name: seconds for name, seconds in part.items() if not isnan(seconds)} for part in rounds]


def _elapsed_seconds(pair: EventPair) -> float:
    """Return the time between two events; NaN if one was not recorded, or if the end is older than the start."""
    try:
        took = pair.start.elapsed_time(pair.end) / 1e3
    except (RuntimeError, ValueError):
        return nan
    return took if took >= 0 else nan


def make_timer(device: torch.device) -> HostTimer | CudaEventTimer:
    """Make the timer of a device: events on a GPU, the host's clock on a CPU."""
    return CudaEventTimer() if device.type == "cuda" else HostTimer()
