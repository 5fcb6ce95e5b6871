"""One round as a timeline: launches by the host, work on the device, and idle gaps.

It is read from `trace.json.gz` of a run with `profile_rounds`. On a GPU, launches are the calls that submit work, and
the work is kernels and copies. On a CPU, both are the outermost torch operators. A replay of the recorder is one
launch, like the replay of a CUDA graph. With `graph.rounds_per_replay`, all rounds of a replay count as one round here.
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
    """A named part of a round, in microseconds from the round's start."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class RoundTimeline:
    """One round, from its start to the start of the next; all times are in microseconds from its start.

    Attributes:
        stages: the stages and replays of the round, by the host's time.
        launches: the calls in which the host submitted work.
        work: the disjoint intervals in which anything ran, in ascending order.
        on_gpu: whether a GPU did the work.
    """

    length_us: float
    stages: list[Stretch]
    launches: list[Stretch]
    work: list[Interval]
    on_gpu: bool

    @property
    def gaps(self) -> list[Interval]:
        """Return the intervals in which nothing ran."""
        edges = [0.0, *(edge for stretch in self.work for edge in stretch), self.length_us]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in pairs if end > start]

    @property
    def idle_share(self) -> float:
        """Return the share of the round in which nothing ran."""
        return sum(end - start for start, end in self.gaps) / self.length_us

    @property
    def longest_gap_us(self) -> float:
        """Return the length of the longest gap."""
        return max((end - start for start, end in self.gaps), default=0.0)


def quietest_round(folder: Path) -> RoundTimeline:
    """Return the shortest profiled round in a run's folder. All rounds do about the same work, so a much longer one was
    delayed by other work on the machine.

    Raises:
        UserError: the trace is missing or broken, or has no whole round.
    """
    rounds = rounds_of(read_trace_file(folder))
    if not rounds:
        raise UserError(
            f"{folder / TRACE_FILE}: none of its rounds is followed by another one; use profile_rounds=4 or more, at "
            "least twice graph.rounds_per_replay, and a larger max_new_tokens if the outputs end sooner"
        )
    return min(rounds, key=lambda each: each.length_us)


def rounds_of(events: Sequence[TraceEvent]) -> list[RoundTimeline]:
    """Return the rounds of a trace in order, without the last one, whose end is unknown."""
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
    """Return the events in which the host submits work, in ascending order."""
    calls = [event for event in events if not event.is_span and not event.on_device]
    if on_gpu:
        return outermost(call for call in calls if LAUNCH.match(call.name))
    replays = [stage for stage in stages if is_replay(stage.name)]
    return outermost([*replays, *calls])


def is_replay(name: str) -> bool:
    """Return whether a span is a replay."""
    return name.removeprefix(STAGE_PREFIX).startswith(REPLAY_PREFIX)


def _begun(events: Sequence[TraceEvent], start: float, end: float) -> list[TraceEvent]:
    """Return the events that begin between `start` and `end`, in ascending order."""
    ordered = sorted(events, key=lambda event: event.start_us)
    first, behind = (bisect_left(ordered, time, key=lambda event: event.start_us) for time in (start, end))
    return ordered[first:behind]


def _from(start: float, event: TraceEvent) -> Stretch:
    return Stretch(event.name.removeprefix(STAGE_PREFIX), event.start_us - start, event.end_us - start)
