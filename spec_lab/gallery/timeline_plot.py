"""The figure of rounds as timelines, one band for each graph mode, on one scale.

The profiler makes launches longer, and runs took place at different times. So a band shows the parts of the profiled
round, but its length is the time of a round without the profiler. That time is relative to the time of an eager round,
measured in turns with it. If a mode was not measured beside eager rounds, all lengths are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.gallery.graph_modes import ModeRound
from spec_lab.gallery.timeline import RoundTimeline, Stretch, is_replay
from spec_lab.record.time_metrics import STAGES
from spec_lab.record.trace import REPLAY_PREFIX
from spec_lab.record.wording import number, percent
from spec_lab.report.graph_table import time_to_eager
from spec_lab.report.plots import PALETTE, open_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = ("stages", "launches", "work")
WORK_COLOUR, GAP_COLOUR, LAUNCH_COLOUR, REPLAY_COLOUR = "0.25", "#f3c6c0", "0.45", "black"
SHORTEST_NAMED = 0.055
"""A bar has the name of its stage if it is longer than this share of the longest round."""


def rounds_as_timelines(rounds: Sequence[ModeRound]) -> Figure:
    """Draw a band for each mode, with three rows: stages by the host's time (a replay has a dark edge), launches (thin
    lines, and thick ones for replays), and the times when anything runs (dark) or nothing does (light red)."""
    from matplotlib.patches import Patch

    lengths, scale = _lengths(rounds)
    longest = max(lengths)
    with open_figure(height=1.0 + 1.0 * len(rounds), width=10.0) as (figure, axes):
        for place, (each, length) in enumerate(zip(rounds, lengths, strict=True)):
            unit = length / each.timeline.length_us
            _draw(axes, each.timeline, 4.0 * place, unit, shortest_named=SHORTEST_NAMED * longest)
            axes.annotate(_title(each), (0, 4.0 * place - 0.62), va="bottom", fontsize="medium")
        middles = [4.0 * place + lane for place in range(len(rounds)) for lane in range(len(LANES))]
        axes.set_yticks(middles, LANES * len(rounds), fontsize="x-small")
        axes.set_ylim(4.0 * len(rounds) - 1.3, -1.6)
        axes.set_xlim(0, longest)
        axes.set(xlabel=scale)
        axes.grid(visible=False, axis="y")
        works = "a kernel or a copy runs" if rounds[0].timeline.on_gpu else "an operator runs"
        handles = [Patch(color=WORK_COLOUR, label=works), Patch(color=GAP_COLOUR, label="nothing runs")]
        figure.legend(handles=handles, loc="outside lower right", ncols=2, frameon=False)
        axes.set_title("One round under each graph mode", loc="left")
    return figure


def _title(each: ModeRound) -> str:
    timeline = each.timeline
    idle = percent(timeline.idle_share, 0)
    lengths = f"{number(each.summary['round_ms'], 1)} ms, {each.profiled_ms:.1f} under the profiler"
    return f"{each.mode}: {number(each.launches, 0)} launches, idle for {idle} of the round; {lengths}"


def _lengths(rounds: Sequence[ModeRound]) -> tuple[list[float], str]:
    """Return the length of a round of each mode, and the label of the scale. Lengths are relative to eager's if each
    mode took turns with an eager run."""
    pairs = [(each.is_eager, time_to_eager(each.summary)) for each in rounds]
    over = [1.0 if is_eager else None if ratio is None else ratio.value for is_eager, ratio in pairs]
    told = [value for value in over if value is not None]
    if len(told) == len(rounds) > 1:
        return told, "time of a round over eager's, in turns without the profiler"
    timed = [each.summary["round_ms"] or each.profiled_ms for each in rounds]
    are_timed = all(each.summary["round_ms"] for each in rounds)
    return timed, f"milliseconds of a round{' without the profiler' if are_timed else ''}"


def _draw(axes: Axes, timeline: RoundTimeline, top: float, unit: float, shortest_named: float) -> None:
    colours = _colours()
    for stage in timeline.stages:
        length = _draw_stage(axes, stage, top, colours, unit)
        if length > shortest_named:
            middle = stage.start_us * unit + length / 2
            axes.annotate(stage.name, (middle, top), ha="center", va="center", fontsize="x-small")
    for replays, colour, width in ((False, LAUNCH_COLOUR, 0.3), (True, REPLAY_COLOUR, 2.5)):
        starts = [launch.start_us * unit for launch in timeline.launches if is_replay(launch.name) == replays]
        axes.vlines(starts, top + 1 - 0.4, top + 1 + 0.4, color=colour, linewidth=width)
    for pieces, colour in ((timeline.gaps, GAP_COLOUR), (timeline.work, WORK_COLOUR)):
        spans = [(start * unit, (end - start) * unit) for start, end in pieces]
        axes.broken_barh(spans, (top + 2 - 0.4, 0.8), facecolors=colour, linewidth=0)


def _draw_stage(axes: Axes, stage: Stretch, top: float, colours: dict[str, Any], unit: float) -> float:
    """Draw the bar of a stage, and return its length."""
    name = stage.name.removeprefix(REPLAY_PREFIX)
    start, length = stage.start_us * unit, (stage.end_us - stage.start_us) * unit
    edge = {"edgecolor": "black", "linewidth": 1.2} if is_replay(stage.name) else {"linewidth": 0}
    axes.barh(top, length, left=start, height=0.8, color=colours.get(name, "0.8"), **edge)
    return length


def _colours() -> dict[str, Any]:
    import seaborn as sns

    return dict(zip(STAGES, sns.color_palette(PALETTE, len(STAGES), desat=0.75), strict=True))
