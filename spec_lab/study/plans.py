"""What a plan measured: the costs of rounds, and its rates beside plain decoding's and those of every fixed K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from spec_lab.record.names import THIS_RUN
from spec_lab.record.reading import Found
from spec_lab.study.compare import drafting
from spec_lab.study.figures import axes_of, signed
from spec_lab.study.frame import EVERY_CATEGORY, frame, labels, own
from spec_lab.study.tables import Table, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE = "batch_tokens_per_second"
BESIDE = "The plan beside plain decoding and every fixed K"
NOTE = (
    "ms: shortest time of a round, from its launch until its results are read. made 0 is a round without the drafter; "
    "offered 0 with made above it lets the drafter catch up with what it missed. Other numbers are interpolated."
)


def beside_table(runs: Sequence[Found], keys: Mapping[str, str]) -> Table:
    """Return a line for each category of each run: the rates of its fixed K and of its plan over plain decoding's.
    `keys`: columns of the frame, by the headers under which they name a run."""
    rows = own(frame(runs))
    rows = rows.loc[rows["K"] > 0, rows.columns.intersection(list(keys.values()), sort=False)].dropna(axis=1, how="all")
    names = rows.rename(columns={column: head for head, column in keys.items()}).astype(str).to_dict("records")
    cells = []
    for name, found in zip(names, drafting(runs), strict=True):
        categories = list(found.run.by_category)
        for category in [EVERY_CATEGORY, *(categories if len(categories) > 1 else [])]:
            numbers = {
                part: of.metrics if category == EVERY_CATEGORY else of.by_category[category]
                for part, of in found.run.parts.items()
            }
            rates = pd.Series({part: each.get(RATE) for part, each in numbers.items()}, dtype=float)
            if rates.isna().any() or "plain" not in rates:
                continue
            fixed = rates.filter(regex=r"^(plain|k\d+)$")
            over = {part: rate / rates["plain"] for part, rate in fixed.items() if part != "plain"}
            plan = {"plan": rates[THIS_RUN] / rates["plain"], "over best": rates[THIS_RUN] / fixed.max()}
            lengths = {"best": fixed.idxmax(), "length": numbers[THIS_RUN]["acceptance_length"]}
            told = {**name, "category": category, "plain tok/s": rates["plain"].round()}
            cells.append({**told, **over, **plan, **lengths})
    table = pd.DataFrame(cells)
    if table.empty:
        return Table(BESIDE, table, table)
    plan, best = table["plan"], table["over best"]
    note = (
        f"Rates over plain decoding's; `over best` is the plan's over the best of the others, plain included. Of "
        f"{len(table)} cells the plan is under .98 of plain in {(plan < 0.98).sum()} (least {plan.min():.2f}) and "
        f"under .97 of the best in {(best < 0.97).sum()} (least {best.min():.2f})."
    )
    ratios = table.loc[:, "plain tok/s":"over best"].iloc[:, 1:]
    whole = pd.DataFrame([{"category": "(geometric mean)", **np.exp(np.log(ratios).mean())}])
    table = pd.concat([table, whole], ignore_index=True)
    shown = table.map(lambda value: value if isinstance(value, str) else "" if pd.isna(value) else f"{value:,.2f}")
    shown["plain tok/s"] = shown["plain tok/s"].str.removesuffix(".00")
    return Table(BESIDE, table, shown, note)


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
            least = part.loc[part["num_made"] > 0, "num_made"].min()
            few = part[part["num_made"] == part["num_offered"].clip(lower=least)]
            [line] = axes.plot(few["num_offered"], few["ms"], "o-", label=f"{name}, {size} requests")
            axes.axhline(part.loc[part["num_made"] == 0, "ms"].min(), color=line.get_color(), linestyle=":")
        axes.set(xlabel="drafts verified for a request (dotted: plain decoding)", ylabel="round, ms")
        if len(costs):
            figure.legend(loc="outside right upper", frameon=False)
    return signed(figure, rows)
