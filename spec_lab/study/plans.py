"""What a plan measured and expected: the costs of rounds, and the tokens of a round beside those that came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from spec_lab.record.reading import Found
from spec_lab.study.compare import drafting
from spec_lab.study.figures import axes_of, signed
from spec_lab.study.frame import frame, labels, own
from spec_lab.study.tables import Table, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "ms: median time of a round, from its launch until its results are read. made 0 is a round without the drafter; "
    "offered 0 with made above it lets the drafter catch up with what it missed. Other numbers are interpolated."
)


def measured_costs(runs: Sequence[Found]) -> pd.DataFrame:
    """Return a row for each shape that a run's plan timed; `run` is the run's label."""
    rows = own(frame(runs))
    names = labels(rows[rows["K"] > 0])
    return pd.DataFrame(
        [
            {"run": name, **cost.model_dump(), "ms": 1e3 * cost.seconds}
            for name, found in zip(names, drafting(runs), strict=True)
            for cost in found.run.costs
        ],
        columns=["run", "num_requests", "num_offered", "num_made", "seconds", "ms"],
    )


def plan_table(runs: Sequence[Found]) -> Table:
    """Return the costs that plans measured."""
    columns = {"run": "run", "requests": "num_requests", "offered": "num_offered", "made": "num_made", "ms": "ms"}
    return table_of(measured_costs(runs), columns, "Costs of rounds that drafter.plan measured", NOTE)


def plan_figure(runs: Sequence[Found]) -> Figure:
    """Draw the time of a round over the drafts that it verifies, by batch size, beside plain decoding's."""
    costs, rows = measured_costs(runs), own(frame(runs))
    with axes_of() as (figure, axes):
        for (name, size), part in costs.groupby(["run", "num_requests"]):
            few = part[part["num_made"] == part.loc[part["num_made"] > 0, "num_made"].min()]
            [line] = axes.plot(few["num_offered"], few["ms"], "o-", label=f"{name}, {size} requests")
            axes.axhline(part.loc[part["num_made"] == 0, "ms"].min(), color=line.get_color(), linestyle=":")
        axes.set(xlabel="drafts verified for a request (dotted: plain decoding)", ylabel="round, ms")
        if len(costs):
            figure.legend(loc="outside right upper", frameon=False)
    return signed(figure, rows)
