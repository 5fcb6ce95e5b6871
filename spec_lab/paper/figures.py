"""The figures of a paper, drawn only from its tables: acceptance by task and position, reliability, the frontier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.paper.table import PaperTable, TableRow, Value
from spec_lab.report.plots import PALETTE, open_figure, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 0.8
"""Fraction of a task's width on the axis that its lines take up."""


def figures_of(tables: Mapping[str, PaperTable]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield the name of each figure that the tables have rows for, and the function that draws it."""
    drawings: Mapping[str, Callable[[PaperTable], Figure]] = {
        "acceptance": acceptance_figure,
        "position": position_figure,
        "reliability_bins": reliability_figure,
        "frontier": frontier_figure,
    }
    for name, draw in drawings.items():
        if name in tables and tables[name].rows:
            yield name, lambda draw=draw, name=name: draw(tables[name])  # type: ignore[misc]


def acceptance_figure(table: PaperTable) -> Figure:
    """Draw acceptance length by task, with intervals; there is a panel for each temperature and a colour for each
    line."""
    import seaborn as sns

    heats = _values(table.rows, "temperature")
    tasks, lines = _values(table.rows, "task"), _values(table.rows, "line")
    colours = dict(zip(lines, sns.color_palette(PALETTE, len(lines)), strict=True))
    height = 1.4 + 0.12 * len(tasks) * len(lines)
    with open_figure(height=height, width=8.5, columns=max(len(heats), 2)) as (figure, axes):
        for panel, heat in zip(axes, heats, strict=False):
            for number, line in enumerate(lines):
                for row in _of(table.rows, line, heat):
                    place = tasks.index(row.values["task"]) + ACROSS * ((number + 0.5) / len(lines) - 0.5)
                    value, low, high = (row.values.get(key) for key in ("length", "length_low", "length_high"))
                    if isinstance(value, float):
                        ends = spread(value, low, high)  # type: ignore[arg-type]
                        panel.errorbar(value, place, xerr=ends, fmt="o", color=colours[line], markersize=4)
            panel.set_title(f"temperature {heat:g}", loc="left")
            panel.set(xlabel="acceptance length, tokens a round")
        for panel in axes[len(heats) :]:
            panel.set_visible(False)
        axes[0].set_yticks(range(len(tasks)), tasks)
        axes[0].set_ylim(len(tasks) - 0.5, -0.5)
        for line in lines:
            axes[0].plot([], [], "o", color=colours[line], label=line)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def position_figure(table: PaperTable) -> Figure:
    """Draw acceptance by draft position, conditional on the left and joint on the right, for each line and
    temperature."""
    import seaborn as sns

    names = list(dict.fromkeys((row.values["line"], row.values["temperature"]) for row in table.rows))
    lines = list(dict.fromkeys(line for line, _ in names))
    colours = dict(zip(lines, sns.color_palette(PALETTE, len(lines)), strict=True))
    with open_figure(height=3.8, width=9.0, columns=2) as (figure, axes):
        for panel, kind in zip(axes, ("conditional", "joint"), strict=True):
            for line, heat in names:
                rows = [row.values for row in _of(table.rows, line, heat)]
                places = [row["position"] for row in rows]
                style = "-" if heat == 0 else "--"
                label = f"{line}, T {heat:g}"
                panel.plot(places, [row[kind] for row in rows], style, marker="o", color=colours[line], label=label)
            panel.set(xlabel="draft position", ylabel="share accepted", ylim=(0, 1.02))
            panel.set_xticks(_values(table.rows, "position"))
            panel.set_title(kind, loc="left")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def reliability_figure(table: PaperTable) -> Figure:
    """Draw the accepted share against mean confidence, with a panel for each task; the diagonal is perfect
    calibration."""
    import seaborn as sns

    tasks, lines = _values(table.rows, "task"), _values(table.rows, "line")
    names = list(dict.fromkeys((row.values["line"], row.values["temperature"]) for row in table.rows))
    colours = dict(zip(lines, sns.color_palette(PALETTE, len(lines)), strict=True))
    with open_figure(height=3.6, width=2.9 * len(tasks) + 2.5, columns=max(len(tasks), 2)) as (figure, axes):
        for panel, task in zip(axes, tasks, strict=False):
            panel.plot([0, 1], [0, 1], color="0.7", linewidth=1)
            for line, heat in names:
                rows = [row.values for row in _of(table.rows, line, heat) if row.values["task"] == task]
                known = [row for row in rows if row["drafts"]]
                style, label = "-" if heat == 0 else "--", f"{line}, T {heat:g}"
                panel.plot(
                    [row["confidence"] for row in known],
                    [row["accepted"] for row in known],
                    style,
                    marker="o",
                    markersize=4,
                    color=colours[line],
                    label=label,
                )
            panel.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1.02))
            panel.set_title(str(task), loc="left")
        axes[0].set_ylabel("share accepted")
        for panel in axes[len(tasks) :]:
            panel.set_visible(False)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def frontier_figure(table: PaperTable) -> Figure:
    """Draw tokens/s per GPU against tokens/s per user, with a point for each batch size at the best K; other K are
    pale."""
    import seaborn as sns

    lines = _values(table.rows, "line")
    with open_figure(height=4.4, width=8.0) as (figure, axes):
        for line, colour in zip(lines, sns.color_palette(PALETTE, len(lines)), strict=True):
            rows = [row.values for row in table.rows if row.values["line"] == line]
            best = [row for row in rows if row["best"] == "yes" or row["draft_tokens"] == 0]
            axes.plot([r["user"] for r in best], [r["gpu"] for r in best], "-o", color=colour, label=line)
            axes.plot([r["user"] for r in rows], [r["gpu"] for r in rows], "o", color=colour, alpha=0.3)
            for row in best:
                words = f" batch {row['batch_size']}" + (f", K {row['draft_tokens']}" if row["draft_tokens"] else "")
                axes.annotate(words, (row["user"], row["gpu"]), fontsize="x-small")
        axes.set(xlabel="tokens a second a user gets", ylabel="tokens a second a GPU gives")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _of(rows: Sequence[TableRow], line: Value, heat: Value) -> list[TableRow]:
    return [row for row in rows if (row.values["line"], row.values["temperature"]) == (line, heat)]


def _values(rows: Sequence[TableRow], key: str) -> list[Any]:
    return list(dict.fromkeys(row.values[key] for row in rows))
