"""One round as a timeline: launches by the host, work on the device, and idle gaps.

From `trace.json.gz` of a run with `profile_rounds`. On a GPU what is launched are the calls that submit work, and what
runs are kernels and copies. On a CPU both are torch operators, the outermost ones; a replay of the recorder is one
launch, whatever runs inside, as the replay of a CUDA graph is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from spec_lab.core.errors import UserError
from spec_lab.record.trace import (
    LAUNCH,
    REPLAY_PREFIX,
    ROUND_SPAN,
    STAGE_PREFIX,
    TRACE_FILE,
    Interval,
    TraceEvent,
    outermost,
    read_trace_file,
    union,
)


class Stretch(NamedTuple):
    """A named stretch of a round, in microseconds from the round's start."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class RoundTimeline:
    """One round, from its start to the start of the next; all times in microseconds from its start.

    Attributes:
        stages: the round's stages and replays as the host went through them.
        launches: what the host submitted.
        work: when anything ran, ascending and disjoint.
        on_gpu: a GPU did the work.
    """

    length_us: float
    stages: list[Stretch]
    launches: list[Stretch]
    work: list[Interval]
    on_gpu: bool

    @property
    def gaps(self) -> list[Interval]:
        """Returns when nothing ran."""
        edges = [0.0, *(edge for stretch in self.work for edge in stretch), self.length_us]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in pairs if end > start]

    @property
    def idle_share(self) -> float:
        """Returns the share of the round in which nothing ran."""
        return sum(end - start for start, end in self.gaps) / self.length_us

    @property
    def longest_gap_us(self) -> float:
        """Returns how long the longest of the gaps is."""
        return max((end - start for start, end in self.gaps), default=0.0)


def quietest_round(folder: Path) -> RoundTimeline:
    """Find the shortest profiled round in a run's folder: all do the same work, so what lengthens one is other work on
    the machine.

    Raises:
        UserError: there is no trace, it is broken, or there is no whole round in it.
    """
    rounds = rounds_of(read_trace_file(folder))
    if not rounds:
        raise UserError(f"{folder / TRACE_FILE}: no round in it that another one follows; use profile_rounds=4 or more")
    return min(rounds, key=lambda each: each.length_us)


def rounds_of(events: Sequence[TraceEvent]) -> list[RoundTimeline]:
    """Return every round of a trace that another one follows, in their order."""
    starts = sorted(event.start_us for event in events if event.name == ROUND_SPAN and not event.on_device)
    on_gpu = any(event.on_device and not event.is_span for event in events)
    stages = [e for e in events if e.is_span and not e.on_device and e.name != ROUND_SPAN]
    launches = _launches(events, stages, on_gpu)
    work = union((e.start_us, e.end_us) for e in events if not e.is_span and e.on_device == on_gpu)
    return [
        RoundTimeline(
            length_us=end - start,
            stages=[_from(start, stage) for stage in _begun(stages, start, end)],
            launches=[_from(start, launch) for launch in _begun(launches, start, end)],
            work=[(max(a, start) - start, min(b, end) - start) for a, b in work if a < end and b > start],
            on_gpu=on_gpu,
        )
        for start, end in pairwise(starts)
    ]


def _launches(events: Sequence[TraceEvent], stages: Sequence[TraceEvent], on_gpu: bool) -> list[TraceEvent]:
    """Return what the host submits, ascending."""
    calls = [event for event in events if not event.is_span and not event.on_device]
    if on_gpu:
        return outermost(call for call in calls if LAUNCH.match(call.name))
    replays = [stage for stage in stages if is_replay(stage.name)]
    return outermost([*replays, *calls])


def is_replay(name: str) -> bool:
    """Tell whether a span is a replay."""
    return name.removeprefix(STAGE_PREFIX).startswith(REPLAY_PREFIX)


def _begun(events: Sequence[TraceEvent], start: float, end: float) -> list[TraceEvent]:
    """Return the events that begin in a stretch of time, ascending."""
    ordered = sorted(events, key=lambda event: event.start_us)
    first, behind = (bisect_left(ordered, time, key=lambda event: event.start_us) for time in (start, end))
    return ordered[first:behind]


def _from(start: float, event: TraceEvent) -> Stretch:
    return Stretch(event.name.removeprefix(STAGE_PREFIX), event.start_us - start, event.end_us - start)
