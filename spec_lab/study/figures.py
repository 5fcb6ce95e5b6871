"""Figures of a frame. Every number is drawn with its interval where the frame has one, and says below where it is from.

Each function returns a matplotlib figure, which a notebook shows and `save` writes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from spec_lab.core.errors import UserError
from spec_lab.record.models import Run
from spec_lab.record.names import THIS_RUN
from spec_lab.record.reading import Found
from spec_lab.record.times import STAGES
from spec_lab.study.frame import (
    EVERY_CATEGORY,
    categories_frame,
    frame,
    labels,
    lengths_by_frame,
    own,
    positions_frame,
    requests_frame,
)
from spec_lab.study.tables import Table, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = "deep"
LETTERS_AN_INCH = 17
Draw = Callable[[], "Figure"]


def numbers_over(
    rows: pd.DataFrame, x: str, y: str, hue: str | None = None, even: float | None = None, title: str = ""
) -> Figure:
    """Draw a number over a knob, with its interval as whiskers: a line for each value of `hue`.

    Args:
        even: where the two sides are equal, drawn as a line.
    """
    with axes_of(height=4.8 if rows[x].nunique() > 6 else 3.6) as (figure, axes):
        draw_numbers(axes, rows, x, y, hue)
        if even is not None:
            axes.axhline(even, color="0.5", linewidth=1)
        figure.suptitle(title, x=0.01, ha="left")
        legend(figure, axes, hue)
    return signed(figure, rows)


def draw_numbers(axes: Axes, rows: pd.DataFrame, x: str, y: str, hue: str | None = None) -> None:
    """Draw a number over a knob into `axes`."""
    import seaborn as sns

    rows = having(rows, y)
    is_numeric = pd.api.types.is_numeric_dtype(rows[x]) and rows[x].nunique() > 1
    places = {value: value if is_numeric else place for place, value in enumerate(dict.fromkeys(rows[x]))}
    groups = [(None, rows)] if hue is None else list(rows.groupby(hue, sort=False))
    colours = sns.color_palette(*palette(len(groups)))
    for number, ((name, part), colour) in enumerate(zip(groups, colours, strict=True)):
        shift = 0 if is_numeric else 0.12 * (number - (len(groups) - 1) / 2)
        part = part.sort_values(x) if is_numeric else part
        xs = [places[value] + shift for value in part[x]]
        axes.errorbar(
            xs,
            part[y].astype(float).tolist(),
            yerr=whiskers(part, y),
            fmt="o-" if is_numeric else "o",
            color=colour,
            capsize=2,
            label=name,
        )
    if not is_numeric:
        axes.set_xticks(list(places.values()), [textwrap.fill(str(value), 14) for value in places])
        for text in axes.get_xticklabels() if len(places) > 6 else ():
            text.set(rotation=30, ha="right")
    else:
        if (rows[x] > 0).all() and rows[x].max() / rows[x].min() >= 8:
            axes.set_xscale("log", base=2)
        if len(places) <= 8:
            axes.set_xticks(sorted(places), [f"{value:g}" for value in sorted(places)])
    unit = unit_of(y)
    axes.set(xlabel=x, ylabel=f"{y.removesuffix('.mean')}{f', {unit}' if unit else ''}")


def whiskers(rows: pd.DataFrame, name: str) -> Any:
    """Return the distances to the ends of the intervals, [2, rows]; None without any."""
    low, high = (next((b for b in (f"{name}.{end}", f"{name}_{end}") if b in rows), None) for end in ("low", "high"))
    if low is None or high is None or rows[low].isna().all():
        return None
    numbers = rows[[name, low, high]].astype(float)
    below, above = numbers[name] - numbers[low], numbers[high] - numbers[name]
    return [below.clip(lower=0).fillna(0).tolist(), above.clip(lower=0).fillna(0).tolist()]


def having(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows that have a number.

    Raises:
        UserError: none has it.
    """
    found = rows.dropna(subset=[name]) if name in rows else rows.iloc[:0]
    if found.empty:
        raise UserError(f"no run has {name}")
    return found


def acceptance_lengths(runs: pd.DataFrame) -> Figure:
    """Draw the acceptance length of each run with its interval over prompts, the longest first."""
    rows = having(own(runs), "acceptance_length").assign(label=lambda rows: labels(rows))
    rows = rows.sort_values("acceptance_length", ascending=False)
    with axes_of(height=1.4 + 0.36 * len(rows)) as (figure, axes):
        places = range(len(rows))
        axes.errorbar(rows["acceptance_length"], places, xerr=whiskers(rows, "acceptance_length"), fmt="o", capsize=2)
        axes.set_yticks(places, rows["label"])
        axes.invert_yaxis()
        axes.set(xlabel="acceptance length: tokens a round, 95 % interval over prompts")
        axes.set_title("What each run gets accepted", loc="left")
    return signed(figure, rows)


def acceptance_by_position(runs: pd.DataFrame) -> Figure:
    """Draw the share of drafts accepted by position: of all rounds, and of those that accepted every earlier draft."""
    rates = positions_frame(runs)
    with axes_of(2) as (figure, axes):
        titles = {"unconditional": "share of all rounds", "conditional": "share of rounds that got there"}
        for part, (kind, title) in zip(axes, titles.items(), strict=True):
            draw_numbers(part, rates[rates["kind"] == kind].astype({"rate": float}), "position", "rate", "label")
            part.set(ylim=(0, 1.02), ylabel="share accepted", xticks=sorted(rates["position"].unique()))
            part.set_title(title, loc="left")
        legend(figure, axes[0])
    return signed(figure, own(runs))


def acceptance_by_context(runs: pd.DataFrame) -> Figure:
    """Draw acceptance length by the length of the text before a round, by turn of a conversation and by phase."""
    every = lengths_by_frame(runs)
    having(every, "acceptance length")
    kinds = [kind for kind in ("context", "turn", "phase") if every[every["by"] == kind]["of"].nunique() > 1]
    kinds = kinds or ["context"]
    with axes_of(len(kinds)) as (figure, axes):
        for part, kind in zip(axes if len(kinds) > 1 else [axes], kinds, strict=True):
            rows = every[every["by"] == kind]
            rows = rows.assign(of=rows["of"] if kind == "phase" else rows["of"].astype(int))
            draw_numbers(part, rows, "of", "acceptance length", "label")
            part.set(xlabel={"context": "tokens before the round, at least", "turn": "turn", "phase": ""}[kind])
        legend(figure, axes[0] if len(kinds) > 1 else axes)
    return signed(figure, own(runs))


def acceptance_by_category(found: Found) -> Figure:
    """Draw a run's acceptance length by category as bars, and each request's as a dot."""
    import seaborn as sns

    categories, requests = categories_frame(found.run), requests_frame(found)
    with axes_of() as (figure, axes):
        order = list(categories["category"])
        sns.barplot(categories, x="acceptance_length", y="category", order=order, color="C0", alpha=0.6, ax=axes)
        sns.stripplot(requests, x="acceptance_length_all", y="category", order=order, color="0.3", size=3, ax=axes)
        axes.set(xlabel="acceptance length: tokens a round; dots are requests", ylabel="")
        axes.set_title("Acceptance by category", loc="left")
    return signed(figure, frame([found]))


def lengths_by_category(runs: Sequence[Found]) -> Figure:
    """Draw acceptance length by run and category, dark is long."""
    import seaborn as sns

    rows = frame(runs)
    names = labels(own(rows)).to_list()
    finished = [found.run for found in runs if found.run.status == "finished"]
    table = pd.DataFrame(
        {
            name: {category: numbers["acceptance_length"] for category, numbers in run.by_category.items()}
            | {EVERY_CATEGORY: run["acceptance_length"]}
            for name, run in zip(names, finished, strict=True)
        }
    ).T
    table = table[table.mean().sort_values(ascending=False).index].astype(float)
    with axes_of(height=1.6 + 0.35 * len(table)) as (figure, axes):
        sns.heatmap(table, annot=True, fmt=".2f", cmap="Blues", cbar=False, ax=axes)
        axes.set_title("Acceptance length by category", loc="left")
    return signed(figure, rows)


def stage_times(runs: pd.DataFrame) -> Figure:
    """Draw the stages of a round as stacked bars: a bar for each part of each run."""
    stages = [name for stage in STAGES if (name := f"stage_ms_per_round.{stage}") in runs and runs[name].notna().any()]
    own_names = labels(runs).astype(str) + ", " if runs["run"].nunique() > 1 else ""
    rows = runs[runs["status"] == "finished"]
    names = own_names + rows["part"]
    with axes_of(height=1.4 + 0.36 * len(rows)) as (figure, axes):
        left = pd.Series(0.0, index=rows.index)
        for stage in stages:
            axes.barh(names, rows[stage].fillna(0), left=left, label=stage.partition(".")[2])
            left = left + rows[stage].fillna(0)
        rest = (rows["round_ms"] - left).clip(lower=0)
        axes.barh(names, rest, left=left, color="0.85", label="between stages, or not told apart")
        axes.invert_yaxis()
        axes.set(xlabel="ms a round")
        axes.set_title("Where the time of a round goes", loc="left")
        legend(figure, axes)
    return signed(figure, runs)


def row_counts(runs: pd.DataFrame) -> Figure:
    """Draw the rows that parts of the catch-up's layer and of the prompt pass compute: a bar for each run, or for each
    part of the only one."""
    import seaborn as sns

    names = [f"catchup_{name}" for name in ("attention", "mlp", "live")] + ["prefill_computed", "prefill_logits"]
    rows = runs[runs["K"] > 0] if runs["run"].nunique() == 1 else own(runs[runs["K"] > 0])
    rows = rows.assign(of=rows["part"] if runs["run"].nunique() == 1 else labels(rows))
    rows = rows.rename(columns={f"rows.{name}": name for name in names})
    long = rows.melt(id_vars="of", value_vars=names, var_name="rows", value_name="count")
    with axes_of(height=1.6 + 0.1 * len(long)) as (figure, axes):
        sns.barplot(long, y="rows", x="count", hue="of", palette=sns.color_palette(*palette(len(rows))), ax=axes)
        sns.move_legend(axes, "upper left", bbox_to_anchor=(1, 1), frameon=False, title=None)
        axes.set(ylabel="")
        axes.set_title("Rows that are computed, and those that are read (live)", loc="left")
    return signed(figure, runs)


def cost_model(runs: pd.DataFrame) -> Figure:
    """Draw what a request round costs in steps of plain decoding, and its acceptance length: where the dot is right of
    the bar, drafting pays."""
    rows = having(own(runs), "break_even_acceptance_length").assign(label=lambda rows: labels(rows))
    with axes_of(height=1.4 + 0.36 * len(rows)) as (figure, axes):
        left = pd.Series(0.0, index=rows.index)
        for name in ("draft", "verify", "rest"):
            widths = rows[f"cost.{name}"].astype(float).fillna(0)
            axes.barh(rows["label"], widths, left=left, label=name)
            left = left + widths
        axes.plot(rows["acceptance_length"], rows["label"], "D", color="black", label="acceptance length")
        axes.invert_yaxis()
        axes.set(xlabel="steps of plain decoding (bar), tokens (dot)")
        axes.set_title("What a round costs, and what it brings", loc="left")
        legend(figure, axes)
    return signed(figure, rows)


def frontier(runs: pd.DataFrame) -> Figure:
    """Draw tokens a second of all requests over those of one, a line for each configuration, by batch size."""
    rows = runs[runs["status"] == "finished"].assign(label=_without_batch)
    rows = rows.drop_duplicates(["label", "batch_size"]).sort_values("batch_size")
    with axes_of() as (figure, axes):
        for name, part in rows.groupby("label", sort=False):
            xs, ys = part["tokens_per_second_a_user"], part["decode_tokens_per_second"]
            axes.plot(xs, ys, "o-", label=name)
            for x, y, batch in zip(xs, ys, part["batch_size"], strict=True):
                axes.annotate(f"{batch}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize="x-small")
        axes.set(xlabel="tokens/s of a request", ylabel="tokens/s of all", xscale="log", yscale="log")
        axes.set_title("The frontier by batch size", loc="left")
        legend(figure, axes)
    return signed(figure, rows)


def gain_against_loss(table: Table) -> Figure:
    """Draw a lossy rule's gain of acceptance length (right is better) and its change of accuracy (up is better); where
    no answer was checked, its distance from the target instead (down is better)."""
    rows = having(table.raw, "gain")
    y = (
        "points to lossless"
        if "points to lossless" in rows and rows["points to lossless"].notna().any()
        else "TV a token"
    )
    import seaborn as sns

    rows = rows.dropna(subset=["gain", y])
    with axes_of(height=4.4) as (figure, axes):
        axes.axhline(0, color="0.4", linewidth=1, zorder=0)
        axes.set_prop_cycle(color=sns.color_palette(*palette(len(rows))))
        for row in rows.to_dict("records"):
            spread = [[row[y] - row.get(f"{y} low", row[y])], [row.get(f"{y} high", row[y]) - row[y]]]
            axes.errorbar(row["gain"], row[y], yerr=spread, fmt="o", capsize=2, label=row["rule"])
        axes.set(xlabel="acceptance length over the lossless run's, tokens a round", ylabel=y)
        axes.set_title("What a lossy rule brings, and what it costs", loc="left")
        legend(figure, axes)
    return figure


def longest_kernels(run: Run, most: int = 14) -> Figure:
    """Draw the kernels of a run's profiled rounds that take longest."""
    kernels = having(pd.DataFrame(run.kernels[:most]), "us_per_round")
    with axes_of(height=1.4 + 0.3 * len(kernels)) as (figure, axes):
        axes.barh(kernels["name"].str.slice(0, 48), kernels["us_per_round"])
        axes.invert_yaxis()
        axes.set(xlabel="microseconds a round, profiled")
        axes.set_title("Kernels of a round (on a CPU: operators)", loc="left")
    return signed(figure, frame([Found(Path(), run)]))


def draw_run(run: Run, folder: Path) -> list[Path]:
    """Save the figures of one finished run below its folder, for trackers."""
    found = Found(folder, run)
    rows = frame([found])
    drawings: dict[str, Draw] = {"stage_times": lambda: stage_times(rows)}
    if run.num_draft_tokens:
        drawings |= {
            "acceptance_by_category": lambda: acceptance_by_category(found),
            "acceptance_by_position": lambda: acceptance_by_position(rows),
            "row_counts": lambda: row_counts(rows),
        }
    if run.kernels:
        drawings["kernels"] = lambda: longest_kernels(run)
    return saved(drawings, folder / "wandb" / "figures")


def saved(drawings: dict[str, Draw], folder: Path) -> list[Path]:
    """Draw and save each as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in drawings.items():
        paths.append(folder / f"{name}.png")
        save(draw(), paths[-1])
    return paths


def save(figure: Figure, target: Path | io.StringIO, form: str = "png") -> None:
    """Save a figure with what is written below it."""
    from matplotlib import pyplot as plt

    figure.savefig(
        target, format=form, bbox_inches="tight", dpi=120, metadata={"Date": None} if form == "svg" else None
    )
    plt.close(figure)


def svg(figure: Figure) -> str:
    """Return a figure as SVG that can stand inside a page."""
    picture = io.StringIO()
    save(figure, picture, "svg")
    text = picture.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def signed(figure: Figure, rows: pd.DataFrame) -> Figure:
    """Write below a figure which runs it shows."""
    text = described(rows)
    if text:
        width = int(LETTERS_AN_INCH * figure.get_size_inches()[0])
        figure.text(0.01, -0.01, textwrap.fill(text, width), va="top", fontsize="x-small", color="0.4")
    return figure


def described(rows: pd.DataFrame) -> str:
    """Return a line that says where and when runs ran."""
    if "run" not in rows or rows.empty:
        return ""
    rows = rows.assign(torch="torch " + rows["versions.torch"].astype(str)) if "versions.torch" in rows else rows
    names = ("name", "target", "device", "target.dtype", "torch", "revision", "date")
    words = [" and ".join(dict.fromkeys(map(str, rows[name].dropna()))) for name in names if name in rows]
    prompts, number = sorted({int(count) for count in rows["num_requests"].dropna()}), rows["run"].nunique()
    counted = f"{number} run{'s' * (number != 1)}, {' or '.join(map(str, prompts))} prompts"
    return ", ".join([words[0], counted, *words[1:]])


@contextmanager
def axes_of(columns: int = 1, height: float = 3.6, width: float = 8.0) -> Iterator[tuple[Figure, Any]]:
    """Open a figure with axes side by side in the lab's style, and leave it out of pyplot's list of open ones."""
    import seaborn as sns
    from matplotlib import pyplot as plt

    with sns.axes_style("whitegrid"), plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spec_lab"}):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def palette(number: int) -> tuple[str, int]:
    """Return a palette of seaborn with so many different colours."""
    return (PALETTE if number <= 10 else "husl"), number


def legend(figure: Figure, axes: Axes, title: str | None = None) -> None:
    """Write a legend beside the axes, and make the figure wider by it."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        columns = 1 + len(names) // 14
        figure.set_figwidth(figure.get_figwidth() + columns * (0.6 + max(map(len, names)) / LETTERS_AN_INCH * 1.3))
        figure.legend(handles, names, loc="outside right upper", frameon=False, title=title, ncols=columns)


def _without_batch(rows: pd.DataFrame) -> Iterable[str]:
    drafting = rows["drafter"].astype(str) + " K=" + rows["K"].astype(str) + ", " + rows["prune"].astype(str)
    named = drafting.where(rows["line"].isna(), rows["line"])
    return named.where(rows["part"] == THIS_RUN, rows["part"])
