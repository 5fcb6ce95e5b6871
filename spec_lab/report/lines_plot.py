"""The figure of a table of knobs: one number against one knob. Each combination of other knobs is a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from spec_lab.record.paired import PairedRatio
from spec_lab.report.plots import PALETTE, open_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
SPREAD = 0.04
"""Horizontal distance between lines at the same place, which keeps their error bars apart."""


@dataclass(frozen=True, slots=True)
class PlottedNumber:
    """A run's point in a figure.

    Attributes:
        place: the label of its position on the knob's axis.
        line: the name of its line, which may be empty if there is only one line.
        value: the number, between `low` and `high`.
        low: the lower end of its interval over turns; equal to `value` if there is none.
        high: the upper end.
    """

    place: str
    line: str
    value: float
    low: float
    high: float


def ends_of(number: float | PairedRatio) -> tuple[float, float, float]:
    """Return the value and the ends of its interval, which equal the value if there is no interval."""
    if isinstance(number, (int, float)):
        return number, number, number
    return number.value, *(number.interval or (number.value, number.value))


def number_over_knob(
    numbers: Sequence[PlottedNumber], title: str, knob: str, quantity: str, even: float | None
) -> Figure:
    """Draw a point for each number with its 95 % interval over turns, and connect the points of a line.

    Places are equally spaced. They are sorted if all of them are numbers, and else stay in the order given.

    Args:
        knob: label of the x axis.
        quantity: label of the y axis.
        even: height of a horizontal line, if any.
    """
    import pandas as pd
    import seaborn as sns

    # Of the three numbers low, value and high, the median is the value and the range is the interval.
    rows = [(each.place, each.line, end) for each in numbers for end in (each.low, each.value, each.high)]
    frame = pd.DataFrame(rows, columns=["place", "line", "number"])
    lines = list(dict.fromkeys(each.line for each in numbers))
    with open_figure(height=4.6, width=8.4) as (figure, axes):
        sns.pointplot(
            frame,
            x="place",
            y="number",
            hue="line",
            order=_in_order([each.place for each in numbers]),
            estimator="median",
            errorbar=("pi", 100),
            palette=sns.color_palette(PALETTE, len(lines)),
            markers=[marker for marker, _ in zip(cycle(MARKERS), lines, strict=False)],
            dodge=SPREAD * (len(lines) - 1),
            linewidth=1.4,
            markersize=6,
            err_kws={"linewidth": 1.2, "alpha": 0.6},
            ax=axes,
        )
        if even is not None:
            axes.axhline(even, color="0.35", linewidth=1, linestyle="--", zorder=0)
        axes.set(xlabel=knob, ylabel=quantity)
        axes.set_title(title, loc="left")
        handles, labels = axes.get_legend_handles_labels()
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
        if any(labels):
            figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure


def _in_order(places: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(places))
    try:
        return sorted(distinct, key=float)
    except ValueError:  # the places are words
        return distinct
