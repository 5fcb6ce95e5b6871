"""The figures of a comparison of drafters (`report.drafter_table`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from spec_lab.report.drafter_table import Cell
from spec_lab.report.known_options import BOUNDS
from spec_lab.report.plots import PALETTE, open_figure, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUND_STYLES = dict(zip(BOUNDS, ("--", ":"), strict=True))
BOUND_COLOUR = "0.45"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")


def acceptance_against_draft_tokens(cells: Sequence[Cell]) -> Figure:
    """Draw acceptance length at each K, one line for each drafter; grey lines are the bounds (oracle and random)."""
    shown = [cell for cell in cells if cell.is_finished and cell.summary["acceptance_length"] is not None]
    colours = _colours(shown)
    with open_figure(height=4.6) as (figure, axes):
        for (drafter, colour), marker in zip(colours.items(), cycle(MARKERS), strict=False):
            points = [(c.num_draft_tokens, c.summary["acceptance_length"]) for c in shown if c.drafter == drafter]
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                linestyle=BOUND_STYLES.get(drafter, "-"),
                marker="" if drafter in BOUNDS and len(points) > 1 else marker,
                label=drafter,
            )
        axes.set_xticks(sorted({cell.num_draft_tokens for cell in shown}))
        axes.set(xlabel="K, draft tokens a round", ylabel="acceptance length, tokens a round")
        axes.set_title("What each drafter gets accepted", loc="left")
        _add_legend(figure, axes)
    return figure


def predicted_against_measured(cells: Sequence[Cell]) -> Figure:
    """Draw measured speedup, with its 95 % interval over turns, against predicted speedup, with a marker for each K.

    On the diagonal the prediction is right; above the dotted line drafting pays. Oracle and random are left out, since
    the oracle's speedup would squeeze the others together.
    """
    timed = [cell for cell in cells if cell.predicted_speedup is not None and cell.speedup is not None]
    shown = [cell for cell in timed if cell.drafter not in BOUNDS]
    colours = _colours(shown)
    markers = dict(zip(sorted({cell.num_draft_tokens for cell in shown}), cycle(MARKERS), strict=False))
    with open_figure(height=5.4) as (figure, axes):
        for cell in shown:
            speedup, predicted = cell.speedup, cell.predicted_speedup
            assert speedup is not None and predicted is not None
            axes.errorbar(
                predicted,
                speedup.value,
                yerr=spread(speedup.value, *speedup.ends),
                fmt=markers[cell.num_draft_tokens],
                color=colours[cell.drafter],
                elinewidth=1.1,
            )
        for drafter, colour in colours.items():
            axes.plot([], [], color=colour, linewidth=3, label=drafter)
        for k, marker in markers.items():
            axes.plot([], [], color="0.25", linestyle="none", marker=marker, label=f"K = {k}")
        axes.axline((1, 1), slope=1, color="0.6", linewidth=1, zorder=0)
        axes.axhline(1, color="0.6", linewidth=1, linestyle=":", zorder=0)
        axes.set(xlabel="predicted: acceptance length / break-even", ylabel="measured speedup over plain decoding")
        axes.set_title("Predicted and measured speedup", loc="left")
        _add_legend(figure, axes)
    return figure


def _colours(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return a colour for each drafter, in the order of the table; oracle and random are grey."""
    import seaborn as sns

    drafters = list(dict.fromkeys(cell.drafter for cell in cells))
    coloured = [drafter for drafter in drafters if drafter not in BOUNDS]
    palette = dict(zip(coloured, sns.color_palette(PALETTE, max(len(coloured), 1)), strict=False))
    return {drafter: palette.get(drafter, BOUND_COLOUR) for drafter in drafters}


def _add_legend(figure: Figure, axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", frameon=False)
