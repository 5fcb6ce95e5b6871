"""Shows how many rows pruning leaves out, and how much time it saves over an unpruned run that took turns with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError
from spec_lab.gallery.studies import told_apart
from spec_lab.record.paired import PairedRatio, over_reference
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.wording import number, with_range

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

ORDER = ("none", "prefill", "post_attention", "catchup")
"""Prunings in ascending order of how much they leave out; others come last."""
PANELS = (
    ("catchup_rows", None, "rows a request round", "catch-up step"),
    ("logit_rows", None, "rows a request", "prompt pass"),
    ("round_ratio", ("round_low", "round_high"), "over the unpruned run's", "time of a round"),
    ("prompt_ratio", ("prompt_low", "prompt_high"), "over the unpruned run's", "time of a prompt pass"),
)
"""For each panel: the column, the columns of its interval, the label of the axis, and the title."""
TIMES = ("round_ratio", "round_low", "round_high", "prompt_ratio", "prompt_low", "prompt_high")


def savings(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row for each run with drafts, sorted by K and pruning. Ratios are missing if no unpruned run took
    turns with it.

    Columns, among others:

    - `catchup_rows`: rows of the catch-up step past the KV write, in a request round.
    - `logit_rows`: prompt rows of a request that reached the logits.
    - `round_ratio`, `round_low`, `round_high`: time of a round over the unpruned run's, turn by turn, with its 95 %
      interval.
    - `prompt_ratio`, `prompt_low`, `prompt_high`: the same for a prompt pass; older records lack its time.

    Raises:
        UserError: no run has drafts.
    """
    import pandas as pd

    drafting = [run for run in runs if run.summary["num_draft_tokens"] and run.summary["rounds"]]
    if not drafting:
        raise UserError("none of these runs drafts; make some with python -m spec_lab experiment=pruning")
    names = told_apart(drafting, [run.summary["choices"].get("prune", "prune") for run in drafting])
    rows = [_row(name, run.summary) for name, run in zip(names, drafting, strict=True)]
    frame = pd.DataFrame(rows).astype(dict.fromkeys(TIMES, float))
    order = [*ORDER, *sorted(set(frame["prune"]) - set(ORDER))]
    place = frame["prune"].map(order.index)
    return frame.assign(place=place).sort_values(["K", "place"], ignore_index=True).drop(columns="place")


def _row(name: str, summary: Summary) -> dict[str, Any]:
    rows = summary["rows"]
    return {
        "prune": name,
        "K": summary["num_draft_tokens"],
        "catchup_rows": rows["catchup_computed"] / summary["rounds"],
        "live_rows": rows["catchup_live"] / summary["rounds"],
        "logit_rows": rows["prefill_logits"] / summary["num_requests"],
        "round_ms": summary["round_ms"],
        "catchup_ms": summary["stage_ms_per_round"].get("catchup"),
        **_ratio("round", over_reference(summary, summary, "unpruned", "round_ms")),
        **_ratio("prompt", over_reference(summary, summary, "unpruned", "prefill_ms_per_request")),
    }


def _ratio(name: str, ratio: PairedRatio | None) -> dict[str, Any]:
    low, high = (None, None) if ratio is None else ratio.ends
    return {
        f"{name}_ratio": None if ratio is None else ratio.value,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_shorter": ratio is not None and ratio.is_below,
        f"{name}_longer": ratio is not None and ratio.is_above,
    }


def rows_and_time(frame: pd.DataFrame) -> Figure:
    """Draw the remaining rows of each pruning on the left, and the remaining time on the right, with a colour for each
    K.

    A dot on the line means the same time as without pruning. Whiskers are the 95 % interval over turns.
    """
    import seaborn as sns

    from spec_lab.report.plots import open_figure

    names = list(dict.fromkeys(frame.sort_values("catchup_rows", ascending=False, kind="stable")["prune"]))
    names = [*(name for name in ORDER if name in names), *(name for name in names if name not in ORDER)]
    draft_tokens = sorted(frame["K"].unique())
    colours = sns.color_palette("crest", len(draft_tokens))
    with open_figure(columns=len(PANELS), height=1.9 + 0.5 * len(names), width=11) as (figure, panels):
        for axes, (column, limits, label, title) in zip(panels, PANELS, strict=True):
            for number_of_k, (k, colour) in enumerate(zip(draft_tokens, colours, strict=True)):
                part = frame[frame["K"] == k].dropna(subset=column)
                shift = 0.24 * (number_of_k - (len(draft_tokens) - 1) / 2)
                places = [names.index(name) + shift for name in part["prune"]]
                if "rows" in column:
                    bars = axes.barh(places, part[column], height=0.22, color=colour)
                    axes.bar_label(bars, fmt=" {:.0f}", fontsize="x-small")
                else:
                    value = part[column]
                    spread = None if limits is None else (value - part[limits[0]], part[limits[1]] - value)
                    axes.errorbar(value, places, xerr=spread, fmt="o", color=colour, capsize=2)
            if "ratio" in column:
                axes.axvline(1, color="0.4", linewidth=1, zorder=0)
            axes.set(xlabel=label)
            axes.set_title(title, loc="left")
            axes.grid(visible=False, axis="y")
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        for k, colour in zip(draft_tokens, colours, strict=True):
            panels[0].barh(0, 0, color=colour, label=f"K = {k}")
        figure.legend(loc="outside lower center", ncols=len(draft_tokens), frameon=False)
    return figure


def conclude(frame: pd.DataFrame) -> str:
    """Say how many rows the strongest pruning saves, and whether rounds are shorter beyond noise."""
    caught_up = frame[frame["live_rows"] > 0]
    if caught_up["prune"].str.fullmatch("none(, .*)?").all():
        return f"No run here prunes a catch-up step, so nothing is said of rows. {_times(frame)}"
    k = int(caught_up["K"].max())
    part = caught_up[caught_up["K"] == k]
    least = part[part["catchup_rows"] == part["catchup_rows"].min()].iloc[-1]
    most = part["catchup_rows"].max()
    computed, unpruned, live = (number(value, 1) for value in (least["catchup_rows"], most, least["live_rows"]))
    rows = f"At K = {k} **{least['prune']}** carries {computed} of {unpruned} rows a request round past the KV write"
    return f"{rows}; the output of {live} is read by anybody. {_times(frame)}"


def _times(frame: pd.DataFrame) -> str:
    if frame["round_ratio"].isna().all():
        return "No unpruned run took turns with these, so nothing is said of time."
    return f"{_told(frame, 'round', 'round')}{_told(frame, 'prompt', 'prompt pass')}".strip()


def _told(frame: pd.DataFrame, name: str, what: str) -> str:
    """Say in how many runs a time differs from the unpruned run's beyond noise, and what the shortest is."""
    import pandas as pd

    timed = frame.dropna(subset=f"{name}_ratio")
    if timed.empty:
        return ""
    if timed[f"{name}_low"].isna().all():
        return f" No {what} is judged: an interval takes three turns (repeats=3 or more)."
    best = timed.sort_values(f"{name}_ratio").iloc[0]
    ends = (None, None) if pd.isna(best[f"{name}_low"]) else (best[f"{name}_low"], best[f"{name}_high"])
    num_shorter, num_longer = timed[f"{name}_shorter"].sum(), timed[f"{name}_longer"].sum()
    left = with_range(best[f"{name}_ratio"], *ends)
    return (
        f" Of {len(timed)} pruned runs {num_shorter} have a shorter {what} than the unpruned run beside them, beyond "
        f"noise, and {num_longer} a longer one; the shortest, {best['prune']} at K = {best['K']}, takes {left} of its "
        "time."
    )
