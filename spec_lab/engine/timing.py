"""Stage timers: spans inside a round. They do not overlap; a stage's time is the sum of its spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class HostTimer:
    """Wall clock around each span: right on a CPU, where a call returns when its work is done."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def round(self) -> Iterator[None]:
        self._seconds.clear()
        yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - start

    def collect(self) -> dict[str, float]:
        return dict(self._seconds)


class CudaEventTimer:
    """Events on the stream around each span, read only in `collect`, so that no span waits for the device."""

    def __init__(self) -> None:
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def round(self) -> Iterator[None]:
        self._events.clear()
        yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._events.append((name, start, end))

    def collect(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for name, start, end in self._events:
            end.synchronize()
            seconds[name] = seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3
        return seconds


def make_timer(device: torch.device) -> HostTimer | CudaEventTimer:
    return CudaEventTimer() if device.type == "cuda" else HostTimer()
