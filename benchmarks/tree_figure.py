"""Draws the picture of docs/log/trees.md from that page's own table, so that the two always agree.

    python benchmarks/tree_figure.py docs/log/trees.md docs/log/trees_speed.png

The table is found by its header: tokens per second over plain decoding by drafter, rows and drafts, with a column for
each batch. A cell with a star becomes a hollow marker.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from study_figures import styled

from spec_lab.program.ending import guarded

HEADER = ("", "rows N", "drafts", "acceptance length", "batch 1")
"""The first words of the table's header; a column for each further batch follows."""
MARKERS = {"chain": "o", "depth 3": "s", "depth 5": "^"}
DASHES = {"chain": "-", "depth 3": "-.", "depth 5": "--"}
Cells = list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)
    figure = draw(read(find_table(options.page.read_text(), HEADER)))
    save(figure, options.picture)
    print(f"{options.picture}: {options.picture.stat().st_size / 1e3:.0f} kB")
    return 0


def save(figure: Any, picture: Path) -> None:
    """Save a figure in 64 colours, which takes a quarter of the bytes of full colour."""
    from PIL import Image

    shades = io.BytesIO()
    figure.savefig(shades, format="png", dpi=75, bbox_inches="tight")
    Image.open(shades).convert("RGB").quantize(64).save(picture, optimize=True)


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


def read(table: list[Cells]) -> pd.DataFrame:
    """Return a row for each measured cell of the table."""
    batches = [int(name.removeprefix("batch ")) for name in table[0][4:]]
    lines = [
        (drafter, shape(cells[2]), int(cells[1]), batch, *number(cell))
        for drafter, cells in filled(table[1:])
        for batch, cell in zip(batches, cells[4:], strict=True)
        if cell != "-"
    ]
    return pd.DataFrame(lines, columns=["drafter", "shape", "rows", "batch", "speed", "starred"])


def filled(body: list[Cells]) -> Iterator[tuple[str, Cells]]:
    """Yield each line with its drafter. The table names a drafter only in the first of its lines."""
    drafter = ""
    for cells in body:
        drafter = cells[0] or drafter
        yield drafter, cells


def number(cell: str) -> tuple[float, bool]:
    """Read a figure that may be bold, and tell whether it has a star."""
    bare = cell.replace("**", "")
    return float(bare.rstrip("*")), bare.endswith("*")


def shape(drafts: str) -> str:
    """Name a line of the picture: a chain, or a tree by its depth."""
    depth = re.search(r"depth \d", drafts)
    return depth[0] if depth else "chain"


def draw(cells: pd.DataFrame) -> Any:
    """Draw speeds by rows, a panel for each drafter and a colour for each batch."""
    sns = styled()
    import matplotlib.pyplot as plt

    batches = sorted(cells["batch"].unique())
    colors = dict(zip(batches, sns.color_palette("colorblind"), strict=False))
    drafters = cells["drafter"].unique()
    figure, panels = plt.subplots(1, len(drafters), figsize=(16, 4.5), sharey=True, squeeze=False)
    for axes, drafter in zip(panels[0], drafters, strict=True):
        panel(axes, cells[cells["drafter"] == drafter], colors)
        axes.set(title=drafter, xlabel="rows a request, N")
    panels[0][0].set_ylabel("tokens/s over plain decoding")
    figure.legend(handles=keys(colors, cells), loc="upper center", ncols=8, bbox_to_anchor=(0.5, 0.0), frameon=False)
    return figure


def panel(axes: Any, cells: pd.DataFrame, colors: dict[int, Any]) -> None:
    """Draw a line for each batch and shape, over a logarithmic x axis with ticks at the measured numbers of rows."""
    from matplotlib.ticker import NullLocator

    for (batch, name), part in cells.sort_values("rows").groupby(["batch", "shape"]):
        axes.plot(part["rows"], part["speed"], color=colors[batch], linestyle=DASHES[name])
        for starred, marked in part.groupby("starred"):
            fill = "white" if starred else colors[batch]
            style = {"color": colors[batch], "markerfacecolor": fill, "markersize": 6, "linestyle": ""}
            axes.plot(marked["rows"], marked["speed"], marker=MARKERS[name], **style)
    rows = sorted(cells["rows"].unique())
    axes.set_xscale("log")
    axes.set_xticks(rows, [str(value) for value in rows])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axhline(1, color="gray", zorder=1)


def keys(colors: dict[int, Any], cells: pd.DataFrame) -> list[Any]:
    """Make the legend: batches by colour, shapes by marker and dashes, the star."""
    from matplotlib.lines import Line2D

    found = [Line2D([], [], color=color, linewidth=4, label=f"batch {batch}") for batch, color in colors.items()]
    for name in sorted(cells["shape"].unique()):
        label = name if name == "chain" else f"tree of {name}"
        found.append(Line2D([], [], color=".3", marker=MARKERS[name], linestyle=DASHES[name], label=label))
    return [
        *found,
        Line2D([], [], color=".3", marker="o", markerfacecolor="white", linestyle="", label="* in the table"),
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
