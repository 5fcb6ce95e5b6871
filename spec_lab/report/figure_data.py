"""Reads the numbers that a figure shows back out of it, for a table of its data: one row for each mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADER = ("panel", "series", "across", "up", "from", "to")


def figure_data(figure: Figure) -> tuple[Sequence[str], list[list[str]]]:
    """Return the header and a row for each point, bar and error bar, with the axes' labels for their positions."""
    rows = [row for axes in figure.axes for row in _of_axes(axes)]
    return HEADER, rows


def _of_axes(axes: Axes) -> Iterator[list[str]]:
    from matplotlib.container import BarContainer, ErrorbarContainer

    panel = axes.get_title(loc="left") or axes.get_xlabel()
    by_colour = {str(line.get_color()): name for line in axes.get_lines() if (name := _name(line))}
    in_bars: set[Any] = set()
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer):
            in_bars |= {container.lines[0], *container.lines[1]}
            yield from _error_bar(axes, panel, container)
        elif isinstance(container, BarContainer):
            yield from _bars(axes, panel, container)
    for line in axes.get_lines():
        if line not in in_bars and line.get_transform() == axes.transData:
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):  # type: ignore[arg-type]
                series = _name(line) or by_colour.get(str(line.get_color()), "")
                yield [panel, series, _place(axes, "x", x), _place(axes, "y", y), "", ""]


def _error_bar(axes: Axes, panel: str, container: Any) -> Iterator[list[str]]:
    marks, _, reaches = container.lines
    if marks is None:
        return
    ends = reaches[0].get_segments() if reaches else [None] * len(marks.get_xdata())
    for x, y, end in zip(marks.get_xdata(), marks.get_ydata(), ends, strict=True):
        low, high = ("", "") if end is None else _reach(axes, end)
        yield [panel, _name(container), _place(axes, "x", x), _place(axes, "y", y), low, high]


def _reach(axes: Axes, segment: Any) -> tuple[str, str]:
    (x, y), (to_x, to_y) = segment
    return (_number(x), _number(to_x)) if x != to_x else (_number(y), _number(to_y))


def _bars(axes: Axes, panel: str, container: Any) -> Iterator[list[str]]:
    for bar in container.patches:
        left, bottom = bar.get_x(), bar.get_y()
        if container.orientation == "horizontal":
            place = _place(axes, "y", bottom + bar.get_height() / 2)
            yield [panel, _name(container), _number(bar.get_width()), place, _number(left), ""]
        else:
            place = _place(axes, "x", left + bar.get_width() / 2)
            yield [panel, _name(container), place, _number(bar.get_height()), _number(bottom), ""]


def _name(artist: Any) -> str:
    name = str(artist.get_label())
    return "" if name.startswith("_") else name


def _place(axes: Axes, along: str, value: Any) -> str:
    """Return the tick label at a position if the axis has text labels, else the number."""
    group = axes.get_shared_y_axes() if along == "y" else axes.get_shared_x_axes()
    axises = [each.yaxis if along == "y" else each.xaxis for each in group.get_siblings(axes)]
    labels = [pair for axis in axises for pair in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)]
    words = {round(float(tick), 6): text for tick, label in labels if (text := label.get_text())}
    word = words.get(round(_as_float(value), 6), "")
    return word if word and not _is_number(word) else _number(value)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _is_number(word: str) -> bool:
    value = _as_float(word.replace("\N{MINUS SIGN}", "-"))
    return value == value


def _number(value: Any) -> str:
    number = _as_float(value)
    return str(value) if number != number else f"{number:.6g}"
