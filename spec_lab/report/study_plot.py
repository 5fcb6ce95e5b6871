"""The figure of a study (`report.study`): the gain and the cost of lossy rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_lab.report.plots import PALETTE, open_figure, spread
from spec_lab.report.study import Point, subject_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "D", "^")
STRICT_SIZE, SIZE = 17.0, 8.0


class Look(NamedTuple):
    """The look of a rule in the figure."""

    marker: str
    colour: Any
    size: float


def acceptance_against_accuracy(points: Sequence[Point]) -> Figure:
    """Draw acceptance length (better to the right) and accuracy (better upwards), both with 95 % intervals.

    There is a panel for each K. The star is strict, and the band its accuracy interval. Each family of rules has its
    marker and colour, darker for larger thresholds, and a line that connects its thresholds.
    """
    import numpy as np
    import seaborn as sns
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    shown = [
        point
        for point in points
        if point.acceptance_length is not None and None not in [point.accuracy[key] for key in ("value", "low", "high")]
    ]
    lengths = sorted({point.num_draft_tokens for point in shown})
    families = dict.fromkeys(point.family for point in shown)
    looks = _choose_looks(shown, list(families), sns)
    with open_figure(height=5.4, width=1.5 + 3.4 * max(len(lengths), 1), columns=max(len(lengths), 1)) as (
        figure,
        panels,
    ):
        panels = np.atleast_1d(panels)
        for k, axes in zip(lengths, panels, strict=False):
            for family in families:
                series = [point for point in shown if (point.num_draft_tokens, point.family) == (k, family)]
                _draw_series(axes, series, looks)
            axes.set_title(f"K = {k}", loc="left", fontweight="bold")
            axes.set_xlabel("acceptance length, tokens a round")
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
            axes.margins(x=0.1)
        panels[0].set_ylabel("answers right")
        _add_legend(figure, panels[0], shown, list(families), looks)
        figure.suptitle(
            f"What lossy acceptance brings and costs, 95 % intervals: {subject_of(points)}", x=0.01, ha="left"
        )
    return figure


def _choose_looks(points: Sequence[Point], families: Sequence[str], sns: Any) -> dict[str, Look]:
    """Choose a look for each rule."""
    looks = {point.rule: Look("*", "gold", STRICT_SIZE) for point in points if point.is_strict}
    relaxed = [family for family in families if family not in looks]
    colours = sns.color_palette(PALETTE, max(len(relaxed), 1))
    for family, colour, marker in zip(relaxed, colours, cycle(MARKERS), strict=False):
        rules = _rules_of(points, family)
        shades = sns.light_palette(colour, len(rules) + 1)[1:]
        looks |= {rule: Look(marker, shade, SIZE) for rule, shade in zip(rules, shades, strict=True)}
    return looks


def _rules_of(points: Sequence[Point], family: str) -> list[str]:
    """Return the rules of a family, sorted by threshold."""
    thresholds = {point.rule: point.threshold or 0.0 for point in points if point.family == family}
    return sorted(thresholds, key=lambda rule: thresholds[rule])


def _draw_series(axes: Axes, series: Sequence[Point], looks: Mapping[str, Look]) -> None:
    """Draw the points of one family at one K, sorted by threshold."""
    joined: tuple[list[float], list[float]] = ([], [])
    for point in series:
        length, accuracy, look = point.acceptance_length, point.accuracy, looks[point.rule]
        low, value, high = accuracy["low"], accuracy["value"], accuracy["high"]
        assert length is not None and low is not None and value is not None and high is not None
        if point.is_strict:
            axes.axhspan(low, high, color="0.93", linewidth=0, zorder=0)
        axes.errorbar(
            length.value,
            value,
            yerr=([value - low], [high - value]),
            xerr=spread(length.value, length.low, length.high),
            fmt="none",
            ecolor="0.45" if point.is_strict else look.colour,
            alpha=0.6,
            elinewidth=1.1,
        )
        edge = "black" if point.is_strict else "0.25"
        _mark(axes, length.value, value, look, look.size, edge)
        joined[0].append(length.value)
        joined[1].append(value)
    if len(series) > 1:
        axes.plot(*joined, color=looks[series[-1].rule].colour, linewidth=1.0, alpha=0.7, zorder=3)


def _mark(axes: Axes, x: Any, y: Any, look: Look, size: float, edge: str) -> list[Any]:
    style: dict[str, Any] = {"markersize": size, "markeredgecolor": edge, "markeredgewidth": 0.8, "zorder": 4}
    return axes.plot(x, y, marker=look.marker, color=look.colour, linestyle="none", **style)


def _add_legend(
    figure: Figure, axes: Axes, points: Sequence[Point], families: Sequence[str], looks: Mapping[str, Look]
) -> None:
    """Explain the colours and markers, one column for each family."""
    columns = [_rules_of(points, family) for family in families]
    handles, labels = [], []
    for rules in columns:
        for rule in [*rules, *[""] * (max(map(len, columns)) - len(rules))]:
            look = looks.get(rule, Look("none", "none", 0.0))
            handles += _mark(axes, [], [], look, 0.8 * look.size, "0.25")
            labels.append(rule)
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(columns), frameon=False)
