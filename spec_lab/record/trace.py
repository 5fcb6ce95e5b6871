"""The names of events in `trace.json.gz`, the profiler's trace of some rounds, and its reader."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from spec_lab.core.errors import UserError
from spec_lab.record.layout import misfit, parse_json

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


class _Row(TypedDict):
    """The keys of an event with a duration that are read."""

    name: str
    cat: str
    ts: float
    dur: float


def read_trace_file(folder: Path) -> list[TraceEvent]:
    """Read the events that have a duration and a category of `ON_HOST` or `ON_DEVICE` from the trace in a run's folder,
    in the file's order.

    Raises:
        UserError: the trace is missing or broken.
    """
    path = folder / TRACE_FILE
    try:
        with path.open("rb") as packed, gzip.open(packed, "rb") as file:
            trace = parse_json(file.read())
        return list(_events(trace))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; a run with profile_rounds=4 writes one") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path}: not a trace of the profiler ({error})") from error


def _events(trace: Any) -> Iterator[TraceEvent]:
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("it has no list traceEvents")
    for number, row in enumerate(trace["traceEvents"]):
        if not isinstance(row, dict) or row.get("ph") != "X" or row.get("cat") not in (*ON_HOST, *ON_DEVICE):
            continue
        problem = misfit(row, _Row, f"traceEvents[{number}]")
        if problem is not None:
            raise ValueError(problem)
        is_span = row["name"].startswith(STAGE_PREFIX)
        yield TraceEvent(row["name"], row["ts"], row["ts"] + row["dur"], row["cat"] in ON_DEVICE, is_span)


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
