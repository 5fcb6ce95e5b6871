"""Figures of any runs that may be compared: acceptance lengths with their intervals, and the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.report.bootstrap import Interval
from spec_lab.report.cost_table import Cost
from spec_lab.report.differing import distinct_words
from spec_lab.report.paired_table import Compared
from spec_lab.report.plots import PALETTE, open_figure, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOISE_COLOUR = "0.55"


def lengths_and_differences(compared: Sequence[Compared]) -> Figure:
    """Draw each run's acceptance length on the left and its difference from the base on the right, with 95 % intervals.

    A grey difference is within noise, since its interval includes 0, or it has no interval.
    """
    import seaborn as sns

    colour, better, _, worse = sns.color_palette(PALETTE, 4)
    words = distinct_words([row.run.run.summary for row in compared])
    names = [f"{row.run.label} {name}" for row, name in zip(compared, words, strict=True)]
    with open_figure(height=1.6 + 0.34 * len(compared), width=9.6, columns=2) as (figure, panels):
        for place, row in enumerate(compared):
            _interval(panels[0], row.length, place, colour)
            seen = {"longer": better, "shorter": worse}.get(row.length_verdict, NOISE_COLOUR)
            _interval(panels[1], row.difference, place, seen)
        panels[1].axvline(0, color="0.6", linewidth=1, zorder=0)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        panels[0].set(xlabel="acceptance length, tokens a round")
        panels[1].set(xlabel=f"difference to {compared[0].run.label}")
        panels[0].set_title("Acceptance length, 95 % intervals", loc="left")
    return figure


def cost_and_speedup(costs: Sequence[Cost]) -> Figure:
    """Draw on the left a round's cost in plain decoding steps, with a mark at the acceptance length: drafting pays if
    the mark is to the right of the bar. Draw on the right the measured speedup, the predicted one, and the speedup at
    the oracle's acceptance length."""
    import seaborn as sns

    draft, verify, rest, mark = sns.color_palette(PALETTE, 4)
    words = distinct_words([cost.run.run.summary for cost in costs])
    names = [f"{cost.run.label} {name}" for cost, name in zip(costs, words, strict=True)]
    with open_figure(height=1.8 + 0.34 * len(costs), width=9.6, columns=2) as (figure, panels):
        for place, cost in enumerate(costs):
            start = 0.0
            for size, colour in ((cost.verify, verify), (cost.draft, draft), (cost.rest, rest)):
                panels[0].barh(place, size or 0.0, left=start, color=colour, height=0.6)
                start += size or 0.0
            if cost.length is not None:
                panels[0].plot(cost.length, place, "d", color="black", markersize=6)
            _speedups(panels[1], cost, place, mark)
        for label, colour in (("verify", verify), ("draft", draft), ("rest", rest)):
            panels[0].barh(0, 0, color=colour, label=label)
        panels[0].plot([], [], "d", color="black", label="acceptance length")
        panels[1].axvline(1, color="0.6", linewidth=1, zorder=0)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        panels[0].set(xlabel="a round, in steps of plain decoding")
        panels[1].set(xlabel="speedup over plain decoding")
        panels[1].plot([], [], "o", color=mark, label="measured")
        panels[1].plot([], [], "|", color="black", markersize=12, label="predicted")
        panels[1].plot([], [], ">", color="0.7", label="at the oracle's length")
        figure.legend(loc="outside lower center", ncols=7, frameon=False)
        panels[0].set_title("What a round costs, and what it brings", loc="left")
    return figure


def _speedups(axes: Axes, cost: Cost, place: int, colour: Any) -> None:
    axes.plot(cost.oracle_speedup, place, ">", color="0.7")
    if cost.predicted is not None:
        axes.plot(cost.predicted, place, "|", color="black", markersize=12)
    if cost.measured is not None:
        _interval(axes, Interval(cost.measured.value, *cost.measured.ends), place, colour)


def _interval(axes: Axes, interval: Interval | None, place: int, colour: Any) -> None:
    if interval is None:
        return
    ends = spread(interval.value, interval.low, interval.high)
    axes.errorbar(interval.value, place, xerr=ends, fmt="o", color=colour, elinewidth=1.2, capsize=2)
