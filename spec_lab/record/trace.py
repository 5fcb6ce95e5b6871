"""What the profiler tells of some rounds: kernels, and the names of events in `trace.json.gz`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACE_FILE = "trace.json.gz"
STAGE_PREFIX = "stage:"
ROUND_SPAN = STAGE_PREFIX + "round"
REPLAY_PREFIX = "replay "

# Runtime calls of torch and libraries begin with cuda, driver calls of Triton with cu. A blocking copy counts as a
# launch and as a sync.
LAUNCH = re.compile(r"(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy|Memset)")
SYNC = re.compile(r"(cuda|cu)((Stream|Event|Device|Ctx)Synchronize|Memcpy(?!.*Async))")

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of the profiled rounds; on a CPU, one operator."""

    name: str
    calls_per_round: float
    us_per_round: float


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event of the profiler's trace.

    Attributes:
        on_device: whether it ran on the GPU, or marks a span there.
        is_span: whether it is a span that the lab marked rather than work.
    """

    name: str
    start_us: float
    end_us: float
    on_device: bool = False
    is_span: bool = False


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, as disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def outermost(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the events that do not begin inside another one, in ascending order."""
    kept: list[TraceEvent] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.end_us)):
        if not kept or event.start_us >= kept[-1].end_us:
            kept.append(event)
    return kept
