"""Counts the host's calls to the device in a round: launches and synchronisations.

On a GPU they are counted in the profiler's trace. On a CPU calls of torch are counted, one operator as one kernel.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spec_lab.core.trees import tensors_in
from spec_lab.engine.tape_rules import ALLOCATIONS, HOST_READS, UPLOADS
from spec_lab.engine.torch_internals import OperatorMode, is_composite, run_composite, schema_of, storage_id
from spec_lab.measure.watched_rounds import WatchedRounds
from spec_lab.record.trace import LAUNCH, SYNC, Interval, TraceEvent, outermost, union

Work = dict[str, float | None]
"""Counts a round, by the names of `spec_lab.record.times`' metrics."""
_HOST_READS = {getattr(torch.Tensor, name) for name in HOST_READS}


def count_trace(events: Iterable[TraceEvent], num_rounds: int, num_replays: int) -> Work:
    """Return the work of one round from a trace of `num_rounds`. Only host calls inside the lab's spans are counted."""
    events = list(events)
    spans = union((e.start_us, e.end_us) for e in events if e.is_span and not e.on_device)
    calls = [e for e in events if not e.is_span and not e.on_device and _is_inside(e.start_us, spans)]
    busy = union((e.start_us, e.end_us) for e in events if e.on_device and not e.is_span)
    return {
        "launches_per_round": _count_outermost(calls, LAUNCH) / num_rounds,
        "replays_per_round": num_replays / num_rounds,
        "host_syncs_per_round": _count_outermost(calls, SYNC) / num_rounds,
        "gpu_busy_ms_per_round": sum(end - start for start, end in busy) / 1e3 / num_rounds,
    }


def _count_outermost(calls: Iterable[TraceEvent], names: re.Pattern[str]) -> int:
    """Return the number of calls with these names; a driver call inside a runtime call is not counted again."""
    return len(outermost(call for call in calls if names.match(call.name)))


def _is_inside(time: float, disjoint: Sequence[Interval]) -> bool:
    index = bisect_right(disjoint, (time, float("inf"))) - 1
    return index >= 0 and time <= disjoint[index][1]


class CountedRounds(WatchedRounds):
    """Counts operators that compute or write, replays, and reads of tensor values, in the spans of the rounds."""

    def __init__(self, num_skipped: int, num_launches: int) -> None:
        super().__init__(num_skipped, num_launches)
        self._launches, self._reads = _Launches(), _HostReads()
        self._is_counting = False

    def work(self) -> Work:
        """Return the work of a round; empty if the requests ended before a whole round was counted."""
        if self.num_rounds == 0:
            return {}
        return {
            "launches_per_round": (self._launches.count + self.num_replays) / self.num_rounds,
            "replays_per_round": self.num_replays / self.num_rounds,
            "host_syncs_per_round": self._reads.count / self.num_rounds,
            "gpu_busy_ms_per_round": None,
        }

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self._is_counting or not self._is_watching:
            yield
            return
        self._is_counting = True
        try:
            with self._reads, self._launches:
                yield
        finally:
            self._is_counting = False

    @contextmanager
    def replay(self, name: str, marks: list[Any]) -> Iterator[None]:
        """Count one launch, whatever the graph contains."""
        self._launches.is_paused = True
        try:
            with super().replay(name, marks):
                yield
        finally:
            self._launches.is_paused = False


class _Launches(OperatorMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:  # counts each part, since each is a node of a tape
                return run_composite(func, args, kwargs)
        result = func(*args, **kwargs)
        self.count += not self.is_paused and _is_launch(func, (args, kwargs), result)
        return result


def _is_launch(func: Any, arguments: Any, result: Any) -> bool:
    """Return whether a GPU would have work; it has none for views, allocations and results that depend only on
    shapes."""
    if func in UPLOADS:
        return result.dim() > 0  # a single number, as in rows[:, 0] = 0, is an argument of the kernel on a GPU
    if func in ALLOCATIONS or torch.Tag.inplace_view in func.tags:
        return False
    if schema_of(func).is_mutable:
        return True
    known = {storage_id(tensor) for tensor in tensors_in(arguments)}
    return any(storage_id(tensor) not in known for tensor in tensors_in(result))


class _HostReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in _HOST_READS
        return func(*args, **(kwargs or {}))
