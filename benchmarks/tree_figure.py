"""Draws the picture of docs/trees.md from that page's own tables, so that the two cannot part.

    python benchmarks/tree_figure.py docs/trees.md docs/trees_speed.png

Two tables are read, each found by its header: acceptance length and tokens per second at batch 1 by rows, and tokens
per second by the batch. A star in them, of a cell or of a whole column, is a hollow marker here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from study_figures import styled

BY_ROWS = ("", "rows N", "drafts", "acceptance length", "tokens/s over plain")
BY_BATCH = ("", "drafts", "batch 1")
"""The first words of the headers of the two tables."""
MARKERS = {"chain": "o", "depth 2": "v", "depth 3": "s", "depth 4": "D", "depth 5": "^"}
DASHES = {"chain": "-", "depth 2": ":", "depth 3": "-.", "depth 4": "-", "depth 5": "--"}
Cells = list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)
    text = options.page.read_text()
    figure = draw(by_rows(find_table(text, BY_ROWS)), by_batch(find_table(text, BY_BATCH)))
    figure.savefig(options.picture, dpi=60, bbox_inches="tight", metadata={"Software": ""})
    print(f"{options.picture}: {options.picture.stat().st_size / 1e3:.0f} kB")
    return 0


def find_table(page: str, header: Cells | tuple[str, ...]) -> list[Cells]:
    """Return the first table whose header begins with `header`: that line, then those of its body."""
    for table in tables(page):
        if tuple(table[0][: len(header)]) == tuple(header):
            return table
    sys.exit(f"no table of the page begins with {' | '.join(header)}")


def tables(page: str) -> Iterator[list[Cells]]:
    """Yield the tables of a page, without the line under the header, each line as its cells."""
    found: list[Cells] = []
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
        elif found:
            yield [found[0], *found[2:]]
            found = []


def by_rows(table: list[Cells]) -> pd.DataFrame:
    """Make a line of each cell of the table by rows."""
    lines = []
    for drafter, cells in filled(table[1:]):
        speed, starred = number(cells[4])
        lines.append((drafter, shape(cells[2]), int(cells[1]), number(cells[3])[0], speed, starred))
    return pd.DataFrame(lines, columns=["drafter", "shape", "rows", "length", "speed", "starred"])


def by_batch(table: list[Cells]) -> pd.DataFrame:
    """Make a line of each measured cell of the table by batch."""
    batches = [number(name.removeprefix("batch ")) for name in table[0][2:]]
    lines = [
        (drafter, shape(cells[1]), int(batch), number(cell)[0], all_starred or number(cell)[1])
        for drafter, cells in filled(table[1:])
        for (batch, all_starred), cell in zip(batches, cells[2:], strict=True)
        if cell != "-"
    ]
    return pd.DataFrame(lines, columns=["drafter", "shape", "batch", "speed", "starred"])


def filled(body: list[Cells]) -> Iterator[tuple[str, Cells]]:
    """Yield each line with its drafter, which stands in the first of several only."""
    drafter = ""
    for cells in body:
        drafter = cells[0] or drafter
        yield drafter, cells


def number(cell: str) -> tuple[float, bool]:
    """Read a figure that may be bold, and tell whether it has a star of its own."""
    bare = cell.replace("**", "")
    return float(bare.rstrip("*")), bare.endswith("*")


def shape(drafts: str) -> str:
    """Name a line of the picture: a chain, or a tree by its depth."""
    depth = re.search(r"depth \d", drafts)
    return depth[0] if depth else "chain"


def draw(rows: pd.DataFrame, batches: pd.DataFrame) -> Any:
    """Draw lengths and speeds by rows, and speeds by batch, a panel each."""
    sns = styled()
    import matplotlib.pyplot as plt

    colors = dict(zip(rows["drafter"].unique(), sns.color_palette("colorblind"), strict=False))
    figure, (length, speed, batch) = plt.subplots(1, 3, figsize=(15, 4))
    lines(length, rows, ("rows", "length"), colors)
    lines(speed, rows, ("rows", "speed"), colors)
    lines(batch, batches, ("batch", "speed"), colors)
    length.set(title="acceptance length, batch 1", xlabel="rows a request, N")
    speed.set(title="tokens/s over plain decoding, batch 1", xlabel="rows a request, N")
    batch.set(title="tokens/s over plain decoding", xlabel="batch (chain of 4 rows, trees of 16)")
    for axes in (speed, batch):
        axes.axhline(1, color="gray", zorder=1)
        axes.set_ylim(0.8, None)
    figure.legend(handles=keys(colors, rows), loc="upper center", ncols=8, bbox_to_anchor=(0.5, 0.0), frameon=False)
    return figure


def lines(axes: Any, frame: pd.DataFrame, columns: tuple[str, str], colors: dict[str, Any]) -> None:
    """Draw a line a drafter and shape along a logarithmic x that marks what was measured."""
    from matplotlib.ticker import NullLocator

    along, up = columns
    for (drafter, name), part in frame.sort_values(along).groupby(["drafter", "shape"]):
        axes.plot(part[along], part[up], color=colors[drafter], linestyle=DASHES[name])
        for _, cell in part.iterrows():
            fill = "white" if cell["starred"] and up == "speed" else colors[drafter]
            # A diamond's corners show behind a square at the same place.
            size = 9 if MARKERS[name] == "D" else 6
            style = {"color": colors[drafter], "markerfacecolor": fill, "markersize": size, "zorder": 11 - size}
            axes.plot(cell[along], cell[up], MARKERS[name], **style)
    values = sorted(frame[along].unique())
    axes.set_xscale("log")
    axes.set_xticks(values, [str(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())


def keys(colors: dict[str, Any], rows: pd.DataFrame) -> list[Any]:
    """Make the legend: drafters by colour, shapes by marker and dashes, the star."""
    from matplotlib.lines import Line2D

    found = [Line2D([], [], color=color, linewidth=4, label=drafter) for drafter, color in colors.items()]
    for name in sorted(rows["shape"].unique()):
        label = name if name == "chain" else f"tree of {name}"
        found.append(Line2D([], [], color=".3", marker=MARKERS[name], linestyle=DASHES[name], label=label))
    return [
        *found,
        Line2D([], [], color=".3", marker="o", markerfacecolor="white", linestyle="", label="* in the table"),
    ]


if __name__ == "__main__":
    sys.exit(main())
