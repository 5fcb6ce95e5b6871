"""The trade-off of relaxed acceptance, compared with strict on the same prompts: tokens gained in a round, and answers
lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_lab.core.errors import UserError
from spec_lab.record.runs import Run
from spec_lab.report.study import Point, read_studies

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def read_points(runs: Sequence[Run]) -> list[Point]:
    """Read the points of the newest study among the runs: one for each rule and K. At each K strict is first.

    Raises:
        UserError: no run with a lossy rule has a strict run to be compared with.
    """
    studies, left_out = read_studies(runs)
    if not studies:
        why = f" ({left_out[0]})" if left_out else ""
        raise UserError(
            f"no lossy rule has a strict run to compare with{why}; make both with python -m spec_lab "
            "experiment=relaxed_thinking"
        )
    return studies[-1]


def trade(points: Sequence[Point]) -> pd.DataFrame:
    """Return one row for each lossy rule and K with checked answers. `gain` is its acceptance length over strict's.
    `difference`, `low` and `high` are the change in accuracy, in percentage points and paired by prompt, with its 95 %
    interval."""
    import pandas as pd

    strict = {point.num_draft_tokens: point for point in points if point.is_strict}
    rows = []
    for point in points:
        base = strict[point.num_draft_tokens].acceptance_length
        if point.change is None or point.acceptance_length is None or base is None:
            continue
        rows.append(
            {
                "rule": point.rule,
                "K": point.num_draft_tokens,
                "gain": point.acceptance_length.value / base.value,
                "difference": 100 * point.change["difference"],
                "low": 100 * point.change["low"],
                "high": 100 * point.change["high"],
                "lost": point.change["lost"],
                "gained": point.change["gained"],
                "n": point.change["n"],
                "equal to strict": point.equal_to_strict,
            }
        )
    columns = ["rule", "K", "gain", "difference", "low", "high", "lost", "gained", "n", "equal to strict"]
    return pd.DataFrame(rows, columns=columns)


def gain_against_loss(frame: pd.DataFrame) -> Figure:
    """Draw the acceptance length over strict's (right is better) and the change in accuracy (up is better).

    Each rule has a colour, and each K a marker. If the paired 95 % interval crosses the line, neither a loss nor a gain
    is shown.
    """
    import seaborn as sns

    from spec_lab.report.drafter_plot import MARKERS
    from spec_lab.report.plots import PALETTE, open_figure

    rules, draft_tokens = list(dict.fromkeys(frame["rule"])), sorted(frame["K"].unique())
    colours = dict(zip(rules, sns.color_palette(PALETTE, len(rules)), strict=True))
    markers = dict(zip(draft_tokens, MARKERS, strict=False))
    with open_figure(height=4.4) as (figure, axes):
        axes.axhline(0, color="0.4", linewidth=1, zorder=0)
        for row in frame.to_dict("records"):
            value, low, high = row["difference"], row["low"], row["high"]
            style = {"fmt": markers[row["K"]], "color": colours[row["rule"]], "capsize": 2}
            axes.errorbar(row["gain"], value, yerr=([value - low], [high - value]), **style)
        for rule, colour in colours.items():
            axes.plot([], [], color=colour, linewidth=3, label=rule)
        for k, marker in markers.items():
            axes.plot([], [], color="0.25", linestyle="none", marker=marker, label=f"K = {k}")
        axes.set(xlabel="acceptance length over strict's", ylabel="change of the accuracy, percentage points")
        axes.set_title("What a relaxed rule brings, and what it costs", loc="left")
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def conclude(frame: pd.DataFrame) -> str:
    """Say how large the largest gain is, whether a loss is shown, and how large a loss these prompts cannot exclude."""
    if frame.empty:
        return "No answer was checked under a relaxed rule, so there is nothing to weigh."
    best = frame.sort_values("gain").iloc[-1]
    losses, gains = frame[frame["high"] < 0], frame[frame["low"] > 0]
    first = (
        f"**{best['rule']}** at K = {best['K']} brings the most: {100 * (best['gain'] - 1):+.0f} % acceptance length "
        f"over strict, with {best['lost']} answers lost and {best['gained']} gained of {best['n']}."
    )
    count = f"Of {len(frame)} relaxed points"
    if losses.empty and gains.empty:
        shown = f"{count} none changes the accuracy beyond its 95 % interval."
    else:
        shown = f"{count} {len(losses)} answer worse than strict beyond their 95 % interval, and {len(gains)} better."
    worst = frame["low"].min()
    return (
        f"{first} {shown} What these prompts cannot exclude is a loss of up to {-min(worst, 0.0):.1f} points; the text "
        f"is strict's, token by token, in {100 * frame['equal to strict'].max():.1f} % of the answers at most."
    )
