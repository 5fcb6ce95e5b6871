"""Compares runs: is a difference more than noise?

Acceptance lengths are compared by a bootstrap over prompts, together where both runs have the same. Decode rates
of two runs are not compared, since the machine may have changed in between; speedups are, since each run measured plain
decoding in turns with its own rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pandas as pd

from spec_lab.record.acceptance import counts_by_request
from spec_lab.record.answers import accuracy_change
from spec_lab.record.models import Request
from spec_lab.record.reading import Found
from spec_lab.record.statistics import Interval, bootstrapped, lengths, mean_ratio, over_reference
from spec_lab.study.frame import ends, frame, labels, own
from spec_lab.study.tables import Table, table_of

NOTE = (
    "difference: acceptance length less that of the base, 95 % bootstrap over prompts, resampled together where "
    "both runs have the same (paired). speedup to base's: each run's decode rate over that of its own plain decoding, "
    "over the same of the base, with Welch's 95 % interval. A difference is within noise if its interval holds 0, or "
    "1. same tokens: the share of the base's output tokens that stand before the first one that differs."
)
COST_NOTE = (
    "draft, verify, rest: stages of a round for each request, in steps of plain decoding; they add up to break-even, "
    "the acceptance length from which drafting pays. predicted: length / break-even. ceiling: the speedup if every "
    "draft were right at this drafter's cost."
)


def drafting(runs: Sequence[Found]) -> list[Found]:
    """Return the finished runs that drafted."""
    return [
        found
        for found in runs
        if found.run.status == "finished" and found.run.num_draft_tokens and found.run["num_requests"]
    ]


def length_difference(mine: Found, base: Found) -> tuple[Interval, bool]:
    """Return a run's acceptance length minus a base run's, and whether it is paired by prompt."""
    sides = [(found.requests, found.run.num_draft_tokens or 0) for found in (mine, base)]
    by_id = {request.id: request for request in sides[1][0]}
    paired = [(r, by_id[r.id]) for r in sides[0][0] if r.id in by_id and by_id[r.id].prompt_ids == r.prompt_ids]
    if len(paired) == len(sides[0][0]) == len(sides[1][0]):
        a, b = (counts_by_request([pair[side] for pair in paired], sides[side][1]) for side in (0, 1))
        return bootstrapped(lambda picks: lengths(a[picks]) - lengths(b[picks]), len(a)), True
    a, b = (counts_by_request(requests, k) for requests, k in sides)
    return bootstrapped(lambda p, q: lengths(a[p]) - lengths(b[q]), len(a), len(b)), False


def comparison_table(runs: Sequence[Found], base: int = 1) -> Table:
    """Return a line for each run that drafted, compared with the one whose number in `runs` (from 1) is `base`."""
    measured = drafting(runs)
    rows = own(frame(runs))
    rows = rows[rows["K"] > 0].assign(label=lambda rows: labels(rows))
    first = runs[base - 1] if runs[base - 1] in measured else measured[0]
    speedups = over_reference(first.run, "plain")
    lines = []
    for row, found in zip(rows.to_dict("records"), measured, strict=True):
        line = {**row, "number": f"#{row['run']}{' (base)' if found is first else ''}"}
        if found is not first:
            difference, is_paired = length_difference(found, first)
            to_base = mean_ratio(over_reference(found.run, "plain"), speedups)
            line |= ends("difference", difference) | ends("to_base", to_base)
            line |= {
                "paired": "yes" if is_paired else "no",
                "is_longer": _said(difference, 0.0, "longer", "shorter"),
                "is_faster": _said(to_base, 1.0, "higher", "lower"),
                "same_tokens": same_tokens(found.requests, first.requests) if is_paired else None,
            }
        lines.append(line)
    columns = {
        "#": "number", "run": "label", "acceptance length": "acceptance_length", "difference": "difference",
        "paired": "paired", " ": "is_longer", "speedup to base's": "to_base", "  ": "is_faster",
        "same tokens": "same_tokens",
    }  # fmt: skip
    return table_of(pd.DataFrame(lines), columns, "Runs beside one of them", NOTE)


def cost_table(runs: Sequence[Found]) -> Table:
    """Return the cost model: what a round costs, where drafting breaks even, and the speedup that this predicts."""
    rows = own(frame(runs))
    if "break_even_acceptance_length" not in rows:
        return table_of(rows.iloc[:0], {})
    rows = rows.dropna(subset=["break_even_acceptance_length"]).assign(label=lambda rows: labels(rows))
    rows["ceiling"] = (rows["K"] + 1) / rows["break_even_acceptance_length"]
    columns = {
        "run": "label", "draft": "cost.draft", "verify": "cost.verify", "rest": "cost.rest",
        "break-even": "break_even_acceptance_length", "length": "acceptance_length", "predicted": "predicted_speedup",
        "measured": "speedup.mean", "ceiling": "ceiling",
    }  # fmt: skip
    return table_of(rows, columns, "What a round costs, in steps of plain decoding", COST_NOTE)


def rule_table(runs: Sequence[Found]) -> Table:
    """Return what lossy rules bring and cost: a line for each lossy run, beside the lossless one of the same K, drafter
    and prompts. None of it is compared without such a run."""
    lossless = [found for found in drafting(runs) if found.run.acceptance_lossless]
    rows = (
        {row["folder"]: row for row in own(frame(runs)).assign(label=lambda rows: labels(rows)).to_dict("records")}
        if runs
        else {}
    )
    lines = []
    for base in lossless:
        peers = [found for found in drafting(runs) if _differs_in_rule(found, base)]
        if not peers:
            continue
        theirs = base.requests
        lines.append({**rows[str(base.folder)], "equal": 1.0})
        for found in peers:
            mine = found.requests
            if [request.prompt_ids for request in mine] != [request.prompt_ids for request in theirs]:
                continue
            gain, _ = length_difference(found, base)
            change = accuracy_change(mine, theirs)
            same = sum(a.output_ids == b.output_ids for a, b in pairwise_of(mine, theirs)) / len(mine)
            line = {**rows[str(found.folder)], "equal": same, **ends("gain", gain), **_changes(change)}
            lines.append(line | _prices(gain, found.run["distance.total_variation"], change))
    columns = {
        "rule": "label", "K": "K", "acceptance length": "acceptance_length", "gain": "gain",
        "TV a token": "distance.total_variation", "KL": "distance.kl", "gain for .01 TV": "gain_per_distance",
        "accuracy": "accuracy", "points to lossless": "points", "lost": "lost", "gained": "gained",
        "gain a point": "gain_per_point", "equal outputs": "equal", "thinking tokens": "thinking.mean_tokens",
        "relaxed hits a 1000": "relaxed.per_1000_tokens",
    }  # fmt: skip
    note = (
        "gain: acceptance length minus the lossless run's, 95 % bootstrap over prompts. points: accuracy minus the "
        "lossless run's in percentage points, paired by prompt. TV, KL: distance of the law that tokens were drawn "
        "from and the target's. There is no price where an interval holds 0."
    )
    return table_of(pd.DataFrame(lines), columns, "What lossy rules bring and cost", note)


def pairwise_of(mine: Sequence[Request], theirs: Sequence[Request]) -> list[tuple[Request, Request]]:
    """Pair the requests of two runs by id."""
    by_id = {request.id: request for request in theirs}
    return [(request, by_id[request.id]) for request in mine if request.id in by_id]


def same_tokens(mine: Sequence[Request], theirs: Sequence[Request]) -> float:
    """Return the share of their output tokens that are the same as mine up to the first one that differs."""
    pairs = [(a.output_ids, b.output_ids) for a, b in pairwise_of(mine, theirs)]
    same = sum(len(list(takewhile(lambda both: both[0] == both[1], zip(a, b, strict=False)))) for a, b in pairs)
    return same / sum(len(b) for _, b in pairs)


def _differs_in_rule(found: Found, base: Found) -> bool:
    """Return whether a run is lossy and differs from the base in its rule alone."""
    from spec_lab.study.frame import BESIDE_THE_RUN

    if found.run.acceptance_lossless is not False or found.run.acceptance_imposed:
        return False
    without = (*BESIDE_THE_RUN, "acceptance", "num_threads")
    mine, theirs = (
        {key: value for key, value in each.run.config.items() if key not in without} for each in (found, base)
    )
    return mine == theirs


def _changes(change: dict[str, float] | None) -> dict[str, float]:
    if change is None:
        return {}
    points = {f"points{end}": 100 * change[key] for end, key in (("", "value"), (".low", "low"), (".high", "high"))}
    return {**points, "lost": change["lost"], "gained": change["gained"]}


def _prices(gain: Interval, variation: float | None, change: dict[str, float] | None) -> dict[str, float | None]:
    gained = 0.0 if gain.holds(0.0) else max(0.0, gain.value)
    is_lost = change is not None and change["high"] < 0
    return {
        "gain_per_distance": gained / (100 * variation) if gained and variation else None,
        "gain_per_point": gained / (-100 * change["value"]) if gained and change is not None and is_lost else None,
    }


def _said(interval: Interval | None, even: float, above: str, below: str) -> str | None:
    if interval is None:
        return None
    if interval.low is None:
        return "not judged"
    return "within noise" if interval.holds(even) else above if interval.value > even else below
