"""Says which runs a table or a figure shows: names, machine, type, prompts, version, revision, date."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_lab.record.schema import Summary
from spec_lab.report.known_options import describe_rule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT_REVISION = 7
LETTERS_AN_INCH = 17
"""Number of letters that fit into an inch of the line below a figure."""


def describe(summaries: Sequence[Summary]) -> str:
    """Return a line that says where and when the runs ran; threads, type, torch and date are those of the last run."""
    newest = summaries[-1]
    prompts = sorted({summary["num_requests"] for summary in summaries})
    revisions = dict.fromkeys((summary["git_revision"] or "unknown")[:SHORT_REVISION] for summary in summaries)
    parts = [
        f"{_count(len(summaries), 'run')} on {', '.join(dict.fromkeys(str(s['device_name']) for s in summaries))}",
        _count(newest["num_threads"], "thread") if newest["device"] == "cpu" else "",
        f"{newest['dtype']}",
        f"{' or '.join(map(str, prompts))} prompts",
        f"torch {newest['versions'].get('torch')}",
        f"revision {' and '.join(revisions)}",
        newest["started_at"][:10],
    ]
    return ", ".join(part for part in parts if part)


def signed(figure: Figure, summaries: Sequence[Summary]) -> Figure:
    """Write below a figure which runs it shows. The text is outside the figure, so save it with a tight bounding
    box."""
    names = ", ".join(dict.fromkeys(summary["name"] for summary in summaries))
    if len(summaries) == 1:
        names = f"{names} ({run_words(summaries[0])})"
    width = int(LETTERS_AN_INCH * figure.get_size_inches()[0])
    if figure.legends:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    for legend in figure.legends:  # else a tight box would move the legend down to the text
        legend.set_bbox_to_anchor((0.0, 0.0, 1.0, 1.0), figure.transFigure)
    figure.text(
        0.01, -0.01, textwrap.fill(f"{names}: {describe(summaries)}", width), va="top", fontsize="x-small", color="0.4"
    )
    return figure


def run_words(summary: Summary) -> str:
    """Return a run's drafter, K, acceptance rule and pruning, as in `eagle3 K=3, strict, catchup`."""
    choices = summary["choices"]
    drafter = f"{choices.get('drafter', '')} K={summary['num_draft_tokens']}"
    return ", ".join(part for part in (drafter, describe_rule(summary).rule, choices.get("prune", "")) if part)


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
