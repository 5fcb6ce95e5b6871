"""One round as a timeline: launches by the host, work on the device, and idle gaps.

It is read from `trace.json.gz` of a run with `profile_rounds`. On a GPU, launches are the calls that submit work, and
the work is kernels and copies. On a CPU, both are the outermost torch operators. A replay of the recorder is one
launch, like the replay of a CUDA graph. With `graph.rounds_per_replay`, all rounds of a replay count as one round here.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from spec_lab.core.errors import UserError
from spec_lab.record.reading import Found
from spec_lab.record.statistics import Interval as Ends
from spec_lab.record.statistics import mean_ratio, over_reference
from spec_lab.record.times import STAGES
from spec_lab.record.trace import (
    LAUNCH,
    REPLAY_PREFIX,
    ROUND_SPAN,
    STAGE_PREFIX,
    TRACE_FILE,
    Interval,
    TraceEvent,
    outermost,
    union,
)
from spec_lab.study.figures import axes_of, signed
from spec_lab.study.frame import ends, frame, labels, own
from spec_lab.study.tables import Table, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORK_COLOUR, GAP_COLOUR = "0.25", "#f3c6c0"
ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
"""The categories of events that are read; other events are skipped."""


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
            name=row["name"],
            start_us=row["ts"],
            end_us=row["ts"] + row["dur"],
            on_device=row["cat"] in ON_DEVICE,
            is_span=row["name"].startswith(STAGE_PREFIX),
        )
        for row in rows
        if row.get("ph") == "X" and row.get("cat") in (*ON_HOST, *ON_DEVICE)
    ]


def quietest_round(folder: Path) -> RoundTimeline:
    """Return the shortest profiled round in a run's folder. All rounds do about the same work, so a much longer one was
    delayed by other work on the machine.

    Raises:
        UserError: the run has no trace, or its trace no whole round.
    """
    rounds = rounds_of(read_trace_file(folder))
    if not rounds:
        raise UserError(f"{folder / TRACE_FILE}: no profiled round is followed by another; use profile_rounds=8")
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


def mode_rounds(runs: Sequence[Found], batch_size: int = 1) -> tuple[pd.DataFrame, list[RoundTimeline]]:
    """Return a row for each run of a batch size that has a trace, by how much its graph mode captures, and the quietest
    profiled round of each. `over_eager` is the time of a round without the profiler, over that of the eager run that
    took turns with it.

    Raises:
        UserError: no run has that batch size and a trace.
    """
    found = [each for each in runs if each.run.config.get("batch_size", 1) == batch_size]
    found = [each for each in found if (each.folder / TRACE_FILE).exists()]
    if not found:
        raise UserError(f"no run of batch_size={batch_size} has a trace; make some with experiment=graph_modes")
    timelines = [quietest_round(each.folder) for each in found]
    rows = own(frame(found)).assign(label=lambda rows: labels(rows)).reset_index(drop=True)
    for index, (each, timeline) in enumerate(zip(found, timelines, strict=True)):
        ratio = mean_ratio(over_reference(each.run, "eager", "round_ms"))
        if ratio is None and rows.loc[index, "graph"] == "eager":
            ratio = Ends(1.0, None, None)
        rounds = each.run["graph.rounds_per_replay"] or 1
        numbers = {
            "over_eager": None,
            **ends("over_eager", ratio),
            "idle_share": timeline.idle_share,
            "longest_gap_us": timeline.longest_gap_us,
            "profiled_ms": timeline.length_us / 1e3 / rounds,
        }
        for name, value in numbers.items():
            rows.loc[index, name] = value
    order = rows.sort_values("launches_per_round", ascending=False).index
    return rows.loc[order].reset_index(drop=True), [timelines[index] for index in order]


def modes_table(rows: pd.DataFrame) -> Table:
    """Return the table of graph modes."""
    columns = {
        "mode": "label", "launches": "launches_per_round", "replays": "replays_per_round",
        "syncs": "host_syncs_per_round", "idle share": "idle_share", "longest gap, us": "longest_gap_us",
        "profiled, ms": "profiled_ms", "round, ms": "round_ms", "over eager": "over_eager",
    }  # fmt: skip
    return table_of(rows, columns, "A round in each graph mode")


def rounds_as_timelines(rows: pd.DataFrame, timelines: Sequence[RoundTimeline]) -> Figure:
    """Draw a band for each mode: stages by the host's time (a replay has a dark edge), launches (thick for replays),
    and when anything runs (dark) or nothing does (light red).

    The profiler makes launches longer, so a band shows the parts of the profiled round, and is as long as a round takes
    without the profiler: over eager's in turns if all modes were measured so, else in milliseconds.
    """
    from matplotlib.patches import Patch

    is_relative = rows["over_eager"].notna().all()
    lengths = rows["over_eager" if is_relative else "round_ms"].astype(float).tolist()
    with axes_of(height=1.0 + 1.0 * len(rows), width=10.0) as (figure, axes):
        for place, (row, timeline, length) in enumerate(zip(rows.to_dict("records"), timelines, lengths, strict=True)):
            _draw(axes, timeline, 4.0 * place, length / timeline.length_us, 0.055 * max(lengths))
            title = f"{row['label']}: {row['launches_per_round']:.0f} launches, idle for {row['idle_share']:.0%}"
            axes.annotate(title, (0, 4.0 * place - 0.62), va="bottom", fontsize="medium")
        middles = [4.0 * place + lane for place in range(len(rows)) for lane in range(3)]
        axes.set_yticks(middles, ("stages", "launches", "work") * len(rows), fontsize="x-small")
        axes.set(ylim=(4.0 * len(rows) - 1.3, -1.6), xlim=(0, max(lengths)))
        axes.set(xlabel="time of a round over eager's, in turns" if is_relative else "milliseconds of a round")
        axes.grid(visible=False, axis="y")
        works = "a kernel or a copy runs" if timelines[0].on_gpu else "an operator runs"
        handles = [Patch(color=WORK_COLOUR, label=works), Patch(color=GAP_COLOUR, label="nothing runs")]
        figure.legend(handles=handles, loc="outside lower right", ncols=2, frameon=False)
    return signed(figure, rows)


def _draw(axes: Axes, timeline: RoundTimeline, top: float, unit: float, shortest_named: float) -> None:
    import seaborn as sns

    colours = dict(zip(STAGES, sns.color_palette("deep", len(STAGES), desat=0.75), strict=True))
    for stage in timeline.stages:
        start, length = stage.start_us * unit, (stage.end_us - stage.start_us) * unit
        edge = {"edgecolor": "black", "linewidth": 1.2} if is_replay(stage.name) else {"linewidth": 0}
        colour = colours.get(stage.name.removeprefix(REPLAY_PREFIX), "0.8")
        axes.barh(top, length, left=start, height=0.8, color=colour, **edge)
        if length > shortest_named:
            axes.annotate(stage.name, (start + length / 2, top), ha="center", va="center", fontsize="x-small")
    for replays, colour, width in ((False, "0.45", 0.3), (True, "black", 2.5)):
        starts = [launch.start_us * unit for launch in timeline.launches if is_replay(launch.name) == replays]
        axes.vlines(starts, top + 0.6, top + 1.4, color=colour, linewidth=width)
    for pieces, colour in ((timeline.gaps, GAP_COLOUR), (timeline.work, WORK_COLOUR)):
        spans = [(start * unit, (end - start) * unit) for start, end in pieces]
        axes.broken_barh(spans, (top + 1.6, 0.8), facecolors=colour, linewidth=0)
