"""Draws what `scripts/h200_studies.sh FOLDER` measured.

    python benchmarks/study_figures.py FOLDER docs/log

The pictures are of break-even by number of drafts, contexts, graph modes and pruning. One without data is left out.
`benchmarks/prompt_outputs.py --figure` draws that of prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from h200_round import Cell
from measured_rows import read_rows

from spec_lab.program.ending import guarded
from spec_lab.record.runs import find_runs

MODES = ("eager", "split_seed", "step_replay", "full_loop", "round", "round, overlap")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures that have data, and print their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pictures", type=Path)
    options = parser.parse_args(arguments)
    drawings: dict[str, tuple[pd.DataFrame, Callable[[pd.DataFrame], Any]]] = {
        "drafts": (recorded(options.folder / "drafts"), draw_drafts),
        "contexts": (recorded(options.folder / "contexts"), draw_contexts),
        "graph_modes": (recorded(options.folder / "graphs"), draw_graphs),
        "pruning": (timed(options.folder / "pruning" / "rounds.csv"), draw_pruning),
    }
    for name, (frame, draw) in drawings.items():
        if frame.empty:
            continue
        grid = draw(frame)
        path = options.pictures / f"{name}.png"
        grid.savefig(path, dpi=70, metadata={"Software": ""})
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


def recorded(folder: Path) -> pd.DataFrame:
    """Read the finished runs of a study, as a line for each."""
    summaries = [run.summary for run in find_runs([folder])] if folder.exists() else []
    return pd.DataFrame(line(summary) for summary in summaries if summary["status"] == "finished")


def line(summary: Any) -> dict[str, Any]:
    """Return the numbers of a record that the pictures show."""
    config = summary["config"]
    overlap = ", overlap" if config["graph"].get("overlap") else ""
    return {
        "K": config["drafter"]["num_draft_tokens"],
        "batch": config["batch_size"],
        "prompt tokens": config["workload"]["prompt_tokens"],
        "new tokens": config["max_new_tokens"],
        "graph mode": config["graph"]["name"] + overlap,
        "ms a round": summary["round_ms"],
        "plain": (summary["references"].get("plain") or {}).get("round_ms"),
    }


def timed(table: Path) -> pd.DataFrame:
    """Read the cells whose catch-up step was timed."""
    rows = [row for row in read_rows(table) if row["K"] != "0" and row["catchup"]]
    return pd.DataFrame(
        {
            "K": int(row["K"]),
            "batch": int(row["batch"]),
            "prompt tokens": int(row["tokens"]),
            "prune.catchup": row["pruned"],
            "catch-up step, ms": float(row["catchup"]),
        }
        for row in rows
    )


def draw_drafts(frame: pd.DataFrame) -> Any:
    """Draw the acceptance length from which drafting pays, by K. A dashed line is the largest possible length, K + 1.

    It is the time of a round over that of plain decoding. The record's own break-even would include the end of a run:
    requests accept different numbers of drafts and end at different times, so the last rounds are not full.
    """
    frame = frame.assign(**{"break-even": frame["ms a round"] / frame["plain"]})
    grid = styled().relplot(
        frame, x="K", y="break-even", hue="batch", kind="line", marker="o", palette="colorblind", height=3.4, aspect=1.4
    )
    drafts = sorted(frame["K"].unique())
    grid.ax.plot(drafts, [k + 1 for k in drafts], color="gray", linestyle="--")
    grid.ax.annotate("K + 1: every draft accepted", (drafts[0] + 1.1, 3.05), color="gray")
    grid.ax.set_xticks(drafts)
    grid.set(ylabel="acceptance length from\nwhich drafting pays", ylim=(1, max(3.2, frame["break-even"].max() + 0.2)))
    return grid


def draw_contexts(frame: pd.DataFrame) -> Any:
    """Draw the time of a round, with and without drafts, and its floor, by context."""
    parts = []
    for _, row in frame.iterrows():
        for drafter, value in (("none", row["plain"]), (f"K={row['K']}", row["ms a round"])):
            num_drafts = 0 if drafter == "none" else int(row["K"])
            cell = Cell(num_drafts, 1.0, int(row["batch"]), int(row["prompt tokens"]), int(row["new tokens"]))
            parts.append((row["prompt tokens"], drafter, "measured", value))
            parts.append((row["prompt tokens"], drafter, "floor", cell.floor_ms()))
    grid = styled().relplot(
        pd.DataFrame(parts, columns=["prompt tokens", "drafts", "", "ms a round"]),
        x="prompt tokens",
        y="ms a round",
        hue="drafts",
        style="",
        kind="line",
        markers=True,
        palette="colorblind",
        height=3.4,
        aspect=1.4,
    )
    return with_ticks(grid.set(xscale="log", ylim=(0, None)), frame["prompt tokens"])


def draw_graphs(frame: pd.DataFrame) -> Any:
    """Draw the time of a round by graph mode, with a panel for each batch size."""
    modes = [mode for mode in MODES if mode in set(frame["graph mode"])]
    grid = styled().catplot(
        frame,
        x="ms a round",
        y="graph mode",
        col="batch",
        kind="bar",
        order=modes,
        color=".6",
        height=2.6,
        aspect=1.1,
        sharex=False,
    )
    for axes in grid.axes.flat:
        axes.bar_label(axes.containers[0], fmt="%.2f", padding=3, fontsize=9)
        axes.margins(x=0.2)
    return grid


def draw_pruning(frame: pd.DataFrame) -> Any:
    """Draw the catch-up step by batch, a panel for every context and K."""
    from matplotlib.ticker import NullLocator

    grid = styled().relplot(
        frame,
        x="batch",
        y="catch-up step, ms",
        hue="prune.catchup",
        style="prune.catchup",
        row="prompt tokens",
        col="K",
        kind="line",
        markers=True,
        palette="colorblind",
        height=2.3,
        aspect=1.1,
        facet_kws={"margin_titles": True},
    )
    grid.set(xscale="log", yscale="log")
    for axes in grid.axes.flat:
        axes.set_yticks([0.25, 0.5, 1, 2], ["0.25", "0.5", "1", "2"])
        axes.yaxis.set_minor_locator(NullLocator())
    return with_ticks(grid, frame["batch"])


def with_ticks(grid: Any, values: Sequence[int]) -> Any:
    """Put ticks on a logarithmic x axis at the measured values, and at no others."""
    from matplotlib.ticker import NullLocator

    ticks = {value: str(value) for value in values if value < 1000}
    ticks |= {value: f"{value // (1024 if value % 1000 else 1000)}k" for value in values if value >= 1000}
    for axes in grid.axes.flat:
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.xaxis.set_minor_locator(NullLocator())
    return grid


def styled() -> Any:
    """Return seaborn, set to draw into files in the style of the other pictures."""
    import matplotlib

    matplotlib.use("agg")
    import seaborn as sns

    sns.set_theme(style="whitegrid", context="notebook", font_scale=0.9)
    return sns


if __name__ == "__main__":
    sys.exit(guarded(main))
