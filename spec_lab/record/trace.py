"""The names of events in `trace.json.gz`, the profiler's trace of some rounds, and its reader."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spec_lab.core.errors import UserError

TRACE_FILE = "trace.json.gz"
STAGE_PREFIX = "stage:"
ROUND_SPAN = STAGE_PREFIX + "round"
REPLAY_PREFIX = "replay "

# Runtime calls of torch and libraries begin with cuda, driver calls of Triton with cu. A blocking copy counts as a
# launch and as a sync.
LAUNCH = re.compile(r"(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy|Memset)")
SYNC = re.compile(r"(cuda|cu)((Stream|Event|Device|Ctx)Synchronize|Memcpy(?!.*Async))")

ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
"""The categories of events that are read; other events are skipped."""

Interval = tuple[float, float]


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


def read_trace_file(folder: Path) -> list[TraceEvent]:
    """Read the events that have a duration and a category of `ON_HOST` or `ON_DEVICE` from the trace in a run's folder,
    in the file's order.

    Raises:
        UserError: the run has no trace.
    """
    path = folder / TRACE_FILE
    if not path.exists():
        raise UserError(f"{path} is missing; a run with profile_rounds=4 writes one")
    with gzip.open(path, "rb") as file:
        rows = json.loads(file.read())["traceEvents"]
    return [
        TraceEvent(
            row["name"],
            row["ts"],
            row["ts"] + row["dur"],
            row["cat"] in ON_DEVICE,
            row["name"].startswith(STAGE_PREFIX),
        )
        for row in rows
        if row.get("ph") == "X" and row.get("cat") in (*ON_HOST, *ON_DEVICE)
    ]


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
