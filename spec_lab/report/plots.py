"""Figures of one run, drawn from its record in `summary.json`. They are matplotlib Figures that pyplot does not
manage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spec_lab.record.runs import load_categories, load_configurations, load_positions
from spec_lab.record.schema import Summary
from spec_lab.record.time_metrics import STAGES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = "colorblind"
REST_COLOUR = "0.85"
ROW_LABELS = {
    "catchup_computed": "catch-up, computed",
    "catchup_live": "catch-up, live",
    "prefill_hidden": "prompt, hidden for the drafter",
    "prefill_logits": "prompt, logits",
}


def spread(value: float, low: float | None, high: float | None) -> tuple[list[float], list[float]] | None:
    """Return how far an error bar reaches down and up; None if there is no interval."""
    return None if low is None or high is None else ([value - low], [high - value])


def acceptance_by_category(summary: Summary, requests: pd.DataFrame | None = None) -> Figure:
    """Draw the pooled acceptance length of each category, lowest on top; with `requests`, each request is a dot.

    Lines mark the acceptance length of the whole run, and the length from which drafting pays.
    """
    import seaborn as sns

    categories = load_categories(summary)
    with open_figure(height=1.2 + 0.38 * max(len(categories), 1)) as (figure, axes):
        colour, line, other_line = sns.color_palette(PALETTE, 3)
        if not categories.empty:
            order = list(categories["category"])
            sns.barplot(categories, x="acceptance_length", y="category", order=order, color=colour, alpha=0.6, ax=axes)
            if requests is not None and not requests.empty:
                dots = {"color": "0.25", "size": 3, "alpha": 0.6, "jitter": 0.25}
                sns.stripplot(requests, x="acceptance_length_all", y="category", order=order, ax=axes, **dots)
                axes.plot([], [], "o", color="0.25", markersize=4, label="a request, cut at its end")
        _mark(axes, summary["acceptance_length"], "whole run", line, "-")
        _mark(axes, summary["break_even_acceptance_length"], "drafting pays from here", other_line, "--")
        imposed = " (imposed)" if summary["acceptance_imposed"] else ""
        axes.set(xlabel=f"acceptance length{imposed}: tokens emitted a round", ylabel="")
        axes.set_xlim(1, (summary["num_draft_tokens"] or 0) + 1.05)
        axes.set_title(f"Acceptance length by category, at most {(summary['num_draft_tokens'] or 0) + 1}", loc="left")
        _legend_below(axes)
    return figure


def acceptance_by_position(summary: Summary) -> Figure:
    """Draw acceptance rate at each draft position: a line for the whole run, and a paler one for each category.

    The left shows unconditional rates, over all rounds; the right shows conditional ones, over the drafts that were
    offered and reached.
    """
    import seaborn as sns

    positions = load_positions(summary)
    with open_figure(columns=2, height=4.0, width=9.0) as (figure, both):
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
    """Draw where a round's time goes, one bar for each configuration. Time outside all stages is grey."""
    import seaborn as sns

    frame = load_configurations(summary)
    with open_figure(height=1.6 + 0.45 * len(frame)) as (figure, axes):
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
    """Draw the number of rows that were computed beyond the KV write, by kind, for each configuration except plain
    decoding."""
    import seaborn as sns

    frame = load_configurations(summary)
    frame = frame[frame["configuration"] != "plain"]
    long = frame.melt(id_vars="configuration", value_vars=list(ROW_LABELS), var_name="kind", value_name="rows")
    long["kind"] = long["kind"].map(ROW_LABELS)
    with open_figure(height=3.4) as (figure, axes):
        colours = sns.color_palette(PALETTE, frame["configuration"].nunique())
        sns.barplot(long, x="rows", y="kind", hue="configuration", palette=colours, ax=axes)
        for bars in axes.containers:
            axes.bar_label(bars, labels=[f" {int(bar.get_width()):,}" for bar in bars], fontsize="small")
        axes.margins(x=0.12)
        axes.set(xlabel="rows in one pass over the workload", ylabel="")
        axes.set_title("Rows computed past the KV write", loc="left")
        _legend_below(axes)
    return figure


@contextmanager
def open_figure(height: float, width: float = 7.5, columns: int = 1) -> Iterator[tuple[Figure, Any]]:
    """Open a figure in the lab's style. Yield it with its axes: one, or an array for several columns that share the y
    axis."""
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
