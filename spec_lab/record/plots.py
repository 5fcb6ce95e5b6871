"""Figures of one run, from its `summary.json`, or of a study; each a matplotlib Figure outside pyplot's list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spec_lab.record.metrics import STAGES
from spec_lab.record.runs import load_categories, load_configurations, load_positions
from spec_lab.record.schema import Summary
from spec_lab.record.study import Point

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = "colorblind"
REST_COLOUR = "0.85"
FAMILY_MARKERS = ("o", "s", "D", "^", "v", "P")
ROW_LABELS = {
    "catchup_computed": "catch-up, computed",
    "catchup_live": "catch-up, live",
    "prefill_hidden": "prompt, hidden for the drafter",
    "prefill_logits": "prompt, logits",
}


def acceptance_by_category(summary: Summary, requests: pd.DataFrame | None = None) -> Figure:
    """Pooled acceptance length a category, hardest on top; with `requests`, each of them as a dot.

    Lines mark the whole run, and the acceptance length from which drafting pays.
    """
    import seaborn as sns

    categories = load_categories(summary)
    with _figure(height=1.2 + 0.38 * max(len(categories), 1)) as (figure, axes):
        colour, line, other_line = sns.color_palette(PALETTE, 3)
        if not categories.empty:
            order = list(categories["category"])
            sns.barplot(categories, x="acceptance_length", y="category", order=order, color=colour, alpha=0.6, ax=axes)
            if requests is not None and not requests.empty:
                dots = {"color": "0.25", "size": 3, "alpha": 0.6, "jitter": 0.25}
                sns.stripplot(requests, x="acceptance_length_all", y="category", order=order, ax=axes, **dots)
                axes.plot([], [], "o", color="0.25", markersize=4, label="a request")
        _mark(axes, summary["acceptance_length"], "whole run", line, "-")
        _mark(axes, summary["break_even_acceptance_length"], "drafting pays from here", other_line, "--")
        imposed = " (imposed)" if summary["acceptance_imposed"] else ""
        axes.set(xlabel=f"acceptance length{imposed}: tokens emitted a round", ylabel="")
        axes.set_xlim(1, (summary["num_draft_tokens"] or 0) + 1.05)
        axes.set_title(f"Acceptance length by category, at most {(summary['num_draft_tokens'] or 0) + 1}", loc="left")
        _legend_below(axes)
    return figure


def acceptance_by_position(summary: Summary) -> Figure:
    """Acceptance rate at each draft position: a line for the whole run, a paler one a category.

    Unconditional on the left, over all rounds; conditional on the right, over the drafts that reached the position.
    """
    import seaborn as sns

    positions = load_positions(summary)
    with _figure(columns=2, height=4.0, width=9.0) as (figure, both):
        for axes, kind in zip(both, ("unconditional", "conditional"), strict=True):
            part = positions[positions["kind"] == kind]
            single, whole = part[part["category"] != "all"], part[part["category"] == "all"]
            if not part.empty:
                colours = sns.color_palette("husl", single["category"].nunique())
                lines = {"x": "position", "y": "rate", "marker": "o", "ax": axes}
                sns.lineplot(single, hue="category", palette=colours, alpha=0.7, **lines)
                sns.lineplot(whole, color="black", linewidth=2.5, label="all", **lines)
            axes.set(xlabel="draft position", ylabel="share accepted", ylim=(0, 1.02))
            axes.set_xticks(sorted(part["position"].unique()))
            axes.set_title(kind, loc="left")
            _drop_legend(axes)
        handles, labels = both[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle("Draft tokens accepted, by position", x=0.01, ha="left")
    return figure


def stage_times(summary: Summary) -> Figure:
    """Where a round's time goes, a bar a configuration. What no stage accounts for is grey."""
    import seaborn as sns

    frame = load_configurations(summary)
    with _figure(height=1.6 + 0.45 * len(frame)) as (figure, axes):
        left = [0.0] * len(frame)
        for stage, colour in zip(STAGES, sns.color_palette(PALETTE, len(STAGES)), strict=True):
            widths = list(frame[f"{stage}_ms"].astype(float).fillna(0.0))
            axes.barh(frame["configuration"], widths, left=left, label=stage, color=colour, height=0.65)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        rounds = list(frame["round_ms"].astype(float).fillna(0.0))
        rest = [max(0.0, total - start) for total, start in zip(rounds, left, strict=True)]
        axes.barh(frame["configuration"], rest, left=left, label="not in a stage", color=REST_COLOUR, height=0.65)
        for row, total in enumerate(rounds):
            axes.annotate(f" {total:.2f}", (max(total, left[row]), row), va="center", fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set(xlabel="milliseconds a round", ylabel="")
        axes.set_title("Stage times", loc="left")
        axes.grid(visible=False, axis="y")
        _legend_below(axes)
    return figure


def row_counts(summary: Summary) -> Figure:
    """Rows that went on past the KV write, by kind and configuration: what pruning leaves out."""
    import seaborn as sns

    frame = load_configurations(summary)
    frame = frame[frame["configuration"] != "plain"]
    long = frame.melt(id_vars="configuration", value_vars=list(ROW_LABELS), var_name="kind", value_name="rows")
    long["kind"] = long["kind"].map(ROW_LABELS)
    with _figure(height=3.4) as (figure, axes):
        colours = sns.color_palette(PALETTE, frame["configuration"].nunique())
        sns.barplot(long, x="rows", y="kind", hue="configuration", palette=colours, ax=axes)
        for bars in axes.containers:
            axes.bar_label(bars, labels=[f" {int(bar.get_width()):,}" for bar in bars], fontsize="small")
        axes.margins(x=0.12)
        axes.set(xlabel="rows in one pass over the workload", ylabel="")
        axes.set_title("Rows computed past the KV write", loc="left")
        _legend_below(axes)
    return figure


def acceptance_against_accuracy(points: Sequence[Point]) -> Figure:
    """What a lossy rule brings (to the right) and costs (downwards), both with 95 % intervals; see `record.study`.

    A colour a K, a marker a family of rules with its thresholds joined by a line, a star for strict.
    """
    import seaborn as sns

    shown = [point for point in points if point.acceptance_length is not None and point.accuracy["value"] is not None]
    lengths = sorted({point.num_draft_tokens for point in shown})
    families = list(dict.fromkeys(point.family for point in shown if not point.is_strict))
    with _figure(height=5.6, width=9.0) as (figure, axes):
        colours = dict(zip(lengths, sns.color_palette(PALETTE, len(lengths)), strict=True))
        markers = {"strict": "*"} | {
            family: FAMILY_MARKERS[i % len(FAMILY_MARKERS)] for i, family in enumerate(families)
        }
        for k in lengths:
            for family in ("strict", *families):
                series = [point for point in shown if (point.num_draft_tokens, point.family) == (k, family)]
                _draw_series(axes, series, colours[k], markers[family])
        for k in lengths:
            axes.plot([], [], color=colours[k], linewidth=4, label=f"K = {k}")
        for family in ("strict", *families):
            size = 13 if family == "strict" else 7
            axes.plot([], [], markers[family], color="0.35", markersize=size, linestyle="none", label=family)
        axes.set(xlabel="acceptance length: tokens emitted a round", ylabel="answers right")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_title("Acceptance length against accuracy, 95 % intervals", loc="left")
        _legend_below(axes)
    return figure


def _draw_series(axes: Axes, series: Sequence[Point], colour: Any, marker: str) -> None:
    """Points of one rule at one K, its threshold beside each."""
    x, y, across, along = [], [], [], []
    for point in series:
        length, accuracy = point.acceptance_length, point.accuracy
        assert length is not None and accuracy["value"] is not None
        assert accuracy["low"] is not None and accuracy["high"] is not None
        x.append(length.value)
        y.append(accuracy["value"])
        across.append((length.value - length.low, length.high - length.value))
        along.append((accuracy["value"] - accuracy["low"], accuracy["high"] - accuracy["value"]))
        if point.threshold is not None:
            text = f"{point.threshold:g}"
            axes.annotate(text, (x[-1], y[-1]), (5, 4), textcoords="offset points", fontsize=8, color="0.25")
    if not series:
        return
    is_strict = series[0].is_strict
    xerr, yerr = list(zip(*across, strict=True)), list(zip(*along, strict=True))
    axes.errorbar(x, y, yerr=yerr, xerr=xerr, fmt="none", ecolor=colour, alpha=0.3, elinewidth=1.2)
    look = {"markersize": 17, "markeredgecolor": "black", "zorder": 4} if is_strict else {"markersize": 7, "zorder": 3}
    axes.plot(x, y, marker=marker, color=colour, linewidth=1.2, **look)


@contextmanager
def _figure(height: float, width: float = 7.5, columns: int = 1) -> Iterator[tuple[Figure, Any]]:
    import seaborn as sns
    from matplotlib.figure import Figure

    with sns.axes_style("whitegrid"):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
        axes = figure.subplots(1, columns, sharey=columns > 1)
        yield figure, axes
        sns.despine(figure, left=True)


def _mark(axes: Axes, value: float | None, label: str, colour: Any, style: str) -> None:
    if value is not None:
        axes.axvline(value, color=colour, linestyle=style, linewidth=1.8, label=f"{label}: {value:.2f}")


def _legend_below(axes: Axes) -> None:
    _drop_legend(axes)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure = axes.get_figure(root=True)
        assert figure is not None
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)


def _drop_legend(axes: Axes) -> None:
    legend = axes.get_legend()
    if legend is not None:
        legend.remove()
