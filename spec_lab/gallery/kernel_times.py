"""The kernels in a run's profiled rounds, and each one's share of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.core.errors import UserError
from spec_lab.gallery.studies import Folders, finished_runs, named
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.wording import number, percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

WIDEST_NAME = 48


def profiled_run(folders: Folders) -> Run:
    """Find the newest finished run in the folders or below that has kernel times.

    Raises:
        UserError: there is no such run.
    """
    found = [run for run in finished_runs(folders) if run.summary["kernels"]]
    if not found:
        raise UserError(
            f"{named(folders)}: none of its finished runs has kernel times; make one with python -m spec_lab "
            "profile_rounds=8"
        )
    return found[-1]


def kernel_times(summary: Summary) -> pd.DataFrame:
    """Return one row for each kernel (on a CPU, operator), longest first: calls and microseconds in a round, and its
    share of the time."""
    import pandas as pd

    frame = pd.DataFrame(summary["kernels"])
    return frame.assign(share=frame["us_per_round"] / frame["us_per_round"].sum())


def longest_kernels(summary: Summary, count: int = 12) -> Figure:
    """Draw the microseconds in a round of the longest kernels, with their numbers of calls."""
    import seaborn as sns

    from spec_lab.report.plots import PALETTE, open_figure

    frame = kernel_times(summary).head(count)
    with open_figure(height=1.3 + 0.3 * len(frame), width=9.0) as (figure, axes):
        axes.barh(range(len(frame)), frame["us_per_round"], color=sns.color_palette(PALETTE)[0], height=0.7)
        axes.set_yticks(range(len(frame)), [_cut(name) for name in frame["name"]], fontsize="small")
        for place, (time, calls) in enumerate(zip(frame["us_per_round"], frame["calls_per_round"], strict=True)):
            axes.annotate(f" {calls:,.0f} calls", (time, place), va="center", fontsize="x-small")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="microseconds a round, of the kernel itself", ylabel="")
        axes.set_title("Where a round's kernel time goes", loc="left")
    return figure


def _cut(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else f"{name[: WIDEST_NAME - 3]}..."


def conclude(summary: Summary) -> str:
    """Say how much time the longest kernel takes, and how many kernels make up most of the time."""
    frame = kernel_times(summary)
    first = frame.iloc[0]
    most = int((frame["share"].cumsum() < 0.8).sum()) + 1
    what = "kernels" if (summary["device"] or "").startswith("cuda") else "operators"
    return (
        f"In the profiled rounds of this run `{_cut(first['name'])}` takes {percent(first['share'], 0)} of "
        f"{number(frame['us_per_round'].sum() / 1e3, 1)} ms a round; {most} of {len(frame)} {what} make up 80 % of it."
    )
