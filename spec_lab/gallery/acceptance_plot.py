"""The figures of acceptance by drafter, category and position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.gallery.acceptance import ALL, DraftedRun, at, lengths, rates
from spec_lab.report.known_options import BOUNDS
from spec_lab.report.plots import PALETTE, open_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUND_COLOUR = "0.6"


def by_drafter(drafted: Sequence[DraftedRun]) -> Figure:
    """Draw acceptance length over all prompts with its 95 % interval: a line for each drafter, a colour for each K."""
    import seaborn as sns

    frame = lengths(drafted)
    frame = frame[frame["category"] == ALL]
    order = list(frame.groupby("drafter")["acceptance_length"].max().sort_values(ascending=False).index)
    draft_tokens = sorted(frame["K"].unique())
    with open_figure(height=1.6 + 0.42 * len(order)) as (figure, axes):
        colours = sns.color_palette("crest", len(draft_tokens))
        for number, (k, colour) in enumerate(zip(draft_tokens, colours, strict=True)):
            part = frame[frame["K"] == k]
            shift = 0.16 * (number - (len(draft_tokens) - 1) / 2)
            places = [order.index(drafter) + shift for drafter in part["drafter"]]
            value = part["acceptance_length"]
            spread = (value - part["low"], part["high"] - value)
            axes.errorbar(value, places, xerr=spread, fmt="o", color=colour, capsize=2, label=f"K = {k}")
        axes.set_yticks(range(len(order)), order)
        axes.set_ylim(len(order) - 0.5, -0.5)
        axes.set(xlabel="acceptance length: tokens a round, 95 % interval over prompts", ylabel="")
        axes.set_title("What each drafter gets accepted", loc="left")
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def by_category(drafted: Sequence[DraftedRun], num_draft_tokens: int) -> Figure:
    """Draw acceptance length at one K: a line for each drafter, a column for all prompts, then one for each
    category, easiest first. Dark is long."""
    import seaborn as sns

    found = at(drafted, num_draft_tokens)
    frame = lengths(found)
    table = frame.pivot_table(index="drafter", columns="category", values="acceptance_length")
    rows = list(dict.fromkeys(each.drafter for each in found if each.drafter in table.index))
    inside = table.drop(columns=ALL).loc[[row for row in rows if row not in BOUNDS] or rows]
    columns = [ALL, *inside.mean().sort_values(ascending=False).index]
    with open_figure(height=1.4 + 0.42 * len(rows), width=2.4 + 0.78 * len(columns)) as (figure, axes):
        colours = sns.color_palette("crest", as_cmap=True)
        style: dict[str, Any] = {"annot": True, "fmt": ".2f", "linewidths": 1.5, "cbar": False}
        sns.heatmap(table.loc[rows, columns], cmap=colours, vmin=1, vmax=num_draft_tokens + 1, ax=axes, **style)
        axes.axvline(1, color="white", linewidth=6)
        axes.tick_params(axis="x", rotation=30, length=0)
        axes.tick_params(axis="y", rotation=0, length=0)
        axes.set(xlabel="", ylabel="")
        axes.set_title(
            f"Acceptance length by category, K = {num_draft_tokens}, at most {num_draft_tokens + 1}", loc="left"
        )
    return figure


def by_position(drafted: Sequence[DraftedRun], num_draft_tokens: int) -> Figure:
    """Draw acceptance rate at each draft position for one K: on the left over all rounds, on the right over those that
    reached the position."""
    import seaborn as sns

    found = at(drafted, num_draft_tokens)
    frame = rates(found)
    names = list(dict.fromkeys(each.drafter for each in found))
    coloured = [name for name in names if name not in BOUNDS]
    palette: dict[str, Any] = dict(zip(coloured, sns.color_palette(PALETTE, len(coloured)), strict=True))
    palette |= dict.fromkeys((name for name in names if name in BOUNDS), BOUND_COLOUR)
    with open_figure(columns=2, height=4.0, width=9.0) as (figure, panels):
        for axes, kind in zip(panels, ("unconditional", "conditional"), strict=True):
            part = frame[frame["kind"] == kind]
            sns.lineplot(
                part, x="position", y="rate", hue="drafter", style="drafter", hue_order=names, style_order=names,
                palette=palette, markers=True, dashes=False, ax=axes,
            )  # fmt: skip
            axes.set(xlabel="draft position", ylabel="share accepted", ylim=(-0.02, 1.02))
            axes.set_xticks(sorted(frame["position"].unique()))
        panels[0].set_title("of all rounds", loc="left")
        panels[1].set_title("where all drafts before it were accepted", loc="left")
        handles, labels = panels[0].get_legend_handles_labels()
        for axes in panels:
            axes.get_legend().remove()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle(f"Drafts accepted, by position, K = {num_draft_tokens}", x=0.01, ha="left")
    return figure
