"""Shows what pruning leaves out, in rows, and what that saves, in time, beside an unpruned run that took turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.errors import UserError
from spec_lab.record.runs import Run
from spec_lab.record.schema import Ratio, Reference, Summary
from spec_lab.record.time_metrics import paired_ratio
from spec_lab.record.verdict import JUDGED_REPEATS, is_noise
from spec_lab.record.wording import number, percent, with_range

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

UNPRUNED = "unpruned"
ORDER = ("none", "prefill", "post_attention", "catchup")
"""They stand in the order of how much they leave out; others come behind."""
PANELS = (
    ("catchup_rows", None, "rows a request round", "catch-up step"),
    ("logit_rows", None, "rows a request", "prompt pass"),
    ("round_ratio", ("round_low", "round_high"), "over the unpruned run's", "time of a round"),
    ("prompt_ratio", None, "over the unpruned run's, medians", "time of a prompt pass"),
)
"""Column, columns of its range, what the axis says, title."""


def savings(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row a run with drafts, by K and pruning; times and ratios are missing where no unpruned run took
    turns.

    `catchup_rows`: rows of the catch-up step past the KV write, a request round. `logit_rows`: prompt rows that reached
    the logits, a request. `round_ratio`, `round_low`, `round_high`: time of a round over the unpruned run's, paired by
    repeat, median and range. `catchup_ratio`, `prompt_ratio`: medians over medians.

    Raises:
        UserError: no run has drafts.
    """
    import pandas as pd

    rows = [_row(run.summary) for run in runs if run.summary["num_draft_tokens"] and run.summary["rounds"]]
    if not rows:
        raise UserError("no run in it drafts; make some with python -m spec_lab experiment=pruning")
    frame = pd.DataFrame(rows)
    names = [*ORDER, *sorted(set(frame["prune"]) - set(ORDER))]
    place = frame["prune"].map(names.index)
    return frame.assign(place=place).sort_values(["K", "place"], ignore_index=True).drop(columns="place")


def _row(summary: Summary) -> dict[str, Any]:
    unpruned = summary["references"].get(UNPRUNED)
    rows = summary["rows"]
    round_ratio = None if unpruned is None else _round_ratio(summary, unpruned)
    return {
        "prune": summary["choices"].get("prune", "prune"),
        "K": summary["num_draft_tokens"],
        "catchup_rows": rows["catchup_computed"] / summary["rounds"],
        "live_rows": rows["catchup_live"] / summary["rounds"],
        "logit_rows": rows["prefill_logits"] / summary["num_requests"],
        "round_ms": summary["round_ms"],
        "round_ratio": None if round_ratio is None else round_ratio["value"],
        "round_low": None if round_ratio is None else round_ratio["low"],
        "round_high": None if round_ratio is None else round_ratio["high"],
        "beyond_noise": round_ratio is not None and _is_judged(summary) and not is_noise(round_ratio),
        "catchup_ratio": _over(_catchup_ms(summary), _catchup_ms(unpruned)),
        "prompt_ratio": _over(
            summary["prefill_ms_per_request"], None if unpruned is None else unpruned["prefill_ms_per_request"]
        ),
    }


def _round_ratio(summary: Summary, unpruned: Reference) -> Ratio | None:
    times, others = ([repeat["round_ms"] for repeat in part["repeats"]] for part in (summary, unpruned))
    return paired_ratio(times, others, over=UNPRUNED)


def _is_judged(summary: Summary) -> bool:
    return len(summary["repeats"]) >= JUDGED_REPEATS


def _catchup_ms(part: Summary | Reference | None) -> float | None:
    return None if part is None else part["stage_ms_per_round"].get("catchup")


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def rows_and_time(frame: pd.DataFrame) -> Figure:
    """Draw left what each pruning leaves of the rows, right what is left of the time; a colour a K.

    A dot on the line is as long as without pruning; its whiskers are the range of the repeats.
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
    """Say how many rows the pruning that leaves out most saves, and whether rounds are shorter, beyond noise."""
    k = int(frame["K"].max())
    part = frame[frame["K"] == k]
    least = part[part["catchup_rows"] == part["catchup_rows"].min()].iloc[-1]
    most = part["catchup_rows"].max()
    computed, unpruned, live = (number(value, 1) for value in (least["catchup_rows"], most, least["live_rows"]))
    rows = f"At K = {k} **{least['prune']}** carries {computed} of {unpruned} rows a request round past the KV write"
    return f"{rows}; the output of {live} is read by anybody. {_times(frame)}"


def _times(frame: pd.DataFrame) -> str:
    timed = frame.dropna(subset="round_ratio")
    if timed.empty:
        return "No unpruned run took turns with these, so nothing is said of time."
    shorter = timed[timed["beyond_noise"] & (timed["round_ratio"] < 1)]
    longer = timed[timed["beyond_noise"] & (timed["round_ratio"] > 1)]
    best = timed.sort_values("round_ratio").iloc[0]
    extreme = with_range(best["round_ratio"], best["round_low"], best["round_high"])
    return (
        f"Of {len(timed)} pruned runs {len(shorter)} have a shorter round than the unpruned run beside them, beyond "
        f"the range of the repeats, and {len(longer)} a longer one; the shortest, {best['prune']} at K = {best['K']}, "
        f"takes {extreme} of its time.{_prompt_passes(timed)}"
    )


def _prompt_passes(timed: pd.DataFrame) -> str:
    ratios = timed["prompt_ratio"].dropna()
    if ratios.empty:
        return ""
    return f" A prompt pass takes {percent(ratios.median(), 0)} of the unpruned one's time, in the median of the runs."
