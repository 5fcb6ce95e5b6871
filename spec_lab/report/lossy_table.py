"""Ranks lossy rules by gain for cost, compared with a lossless run that differs only in the rule.

`python -m spec_lab.report FOLDER` shows it for a sweep that has both, such as `experiment=lossy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.core.errors import UserError, visible
from spec_lab.record.answer_metrics import accuracy_change, answers_cut
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.runs import Run
from spec_lab.record.schema import AccuracyChange, Distance, Summary
from spec_lab.record.wording import ABSENT, number
from spec_lab.report.bootstrap import Interval, bootstrap_difference
from spec_lab.report.cells import interval_cell
from spec_lab.report.study import NOT_COMPARED, key_without
from spec_lab.report.table import format_table, paragraph

NOTE = """\
Gain: acceptance length minus that of the lossless run in the first line, with its 95 % interval over prompts. TV and
KL: distance between the distribution that tokens were drawn from and the target's. Accuracy: difference in percentage
points, paired by prompt, with its interval. There is no price for a gain or a loss whose interval includes 0."""


@dataclass(frozen=True, slots=True)
class Price:
    """A rule with its gain and its cost.

    Attributes:
        gain: acceptance length minus that of the lossless run; None if too few drafts were judged.
        distance: distance from the target's distribution; None for a rule that does not report one.
        change: change of the accuracy from the lossless run; None for that run itself, if no answer was checked in
            both, or if all outputs were cut off without a right answer.
    """

    rule: str
    num_draft_tokens: int
    acceptance_length: float | None
    gain: Interval | None
    distance: Distance | None
    change: AccuracyChange | None

    @property
    def gain_per_distance(self) -> float | None:
        """Return the tokens gained in each round per hundredth of total variation; None if one of them is 0 or
        unknown."""
        variation = None if self.distance is None else self.distance["total_variation"]
        return self._gained / (100 * variation) if self._gained and variation else None

    @property
    def gain_per_point(self) -> float | None:
        """Return the tokens gained in each round per percentage point of accuracy lost; None without gain or loss."""
        is_lost = self.change is not None and self.change["high"] < 0
        return self._gained / (-100 * self.change["difference"]) if self._gained and self.change and is_lost else None

    @property
    def _gained(self) -> float:
        """Return the gain if its whole interval is above 0, else 0."""
        return 0.0 if self.gain is None or self.gain.holds_zero else max(0.0, self.gain.value)


@dataclass(frozen=True, slots=True)
class PricedRules:
    """The rules of runs that differ in nothing else: the lossless one, those without a distance, then the others by
    gain for distance.

    `subject`: what the runs have in common, as in `target=pocket, drafter=eagle3`.
    """

    subject: str
    prices: list[Price]
    left_out: list[str]


def read_prices(runs: Sequence[Run]) -> list[PricedRules]:
    """Return a table for each set of runs that differ only in the rule, if one is lossless and one has a distance. The
    others are compared with the first lossless run."""
    tables: dict[str, list[Run]] = {}
    for run in runs:
        if run.summary["status"] == "finished" and run.summary["num_draft_tokens"]:
            tables.setdefault(key_without(run, (*NOT_COMPARED, "acceptance")), []).append(run)
    return [
        _priced(next(run for run in table if run.summary["acceptance_lossless"]), table)
        for table in tables.values()
        if any(run.summary["acceptance_lossless"] for run in table)
        and any(run.summary.get("distance") is not None for run in table)
    ]


def format_prices(priced: PricedRules) -> str:
    """Write the table, one line for each rule."""
    header = [
        "rule", "K", "acceptance length", "gain", "TV a token", "KL", "gain for .01 TV", "accuracy", "gain a point",
    ]  # fmt: skip
    body = [
        [
            price.rule,
            str(price.num_draft_tokens),
            number(price.acceptance_length),
            ABSENT if place == 0 else interval_cell(price.gain),
            number(None if price.distance is None else price.distance["total_variation"], 4),
            number(None if price.distance is None else price.distance["kl"], 4),
            number(price.gain_per_distance, 3),
            _change(price.change),
            number(price.gain_per_point, 3),
        ]
        for place, price in enumerate(priced.prices)
    ]
    heading = visible(f"What lossy rules bring for their distance: {priced.subject}")
    return "\n\n".join([heading, format_table(header, body, left=("rule",)), paragraph(NOTE), *priced.left_out])


def _priced(base: Run, runs: Sequence[Run]) -> PricedRules:
    """Return the gain and cost of each rule in `runs` against `base`, and why some runs cannot be read or compared.
    Rules that impose acceptance are left out."""
    prices, left_out = [], []
    for run in runs:
        if run is base or run.summary["acceptance_imposed"]:
            continue
        try:
            prices.append(_price(run, base))
        except UserError as error:
            left_out.append(f"left out of the prices: {error}")
    prices.sort(key=lambda price: (price.distance is not None, -(price.gain_per_distance or 0.0)))
    choices = base.summary["choices"]
    subject = ", ".join(f"{group}={choices[group]}" for group in ("target", "drafter", "prune") if group in choices)
    return PricedRules(subject, [_price(base, base), *prices], left_out)


def _price(run: Run, base: Run) -> Price:
    rows, base_rows = (read_all_request_rows(each.folder, each.summary) for each in (run, base))
    if [row["prompt_ids"] for row in rows] != [row["prompt_ids"] for row in base_rows]:
        raise UserError(f"{run.folder}: its prompts differ from those of {base.folder}; run the whole sweep again")
    num_drafts = run.summary["num_draft_tokens"] or 0
    correct, of_base = ({row["id"]: row["correct"] for row in part} for part in (rows, base_rows))
    is_cut = answers_cut(run.summary, base.summary)
    return Price(
        rule=_rule(run.summary),
        num_draft_tokens=num_drafts,
        acceptance_length=run.summary["acceptance_length"],
        gain=bootstrap_difference(rows, num_drafts, base_rows, num_drafts),
        distance=run.summary.get("distance"),
        change=None if is_cut or run is base else accuracy_change(correct, of_base, over="lossless"),
    )


def _rule(summary: Summary) -> str:
    """Return a rule's name with its knobs except `lossless_only` and `allow_lossy`, since runs of one rule may differ
    only in knobs."""
    options: Mapping[str, Any] = summary["config"].get("acceptance", {})
    knobs = [f"{key} {value}" for key, value in options.items() if key not in ("name", "lossless_only", "allow_lossy")]
    return ", ".join([str(options.get("name", ABSENT)), *knobs])


def _change(change: AccuracyChange | None) -> str:
    if change is None:
        return ABSENT
    value, low, high = (f"{100 * change[key]:+.1f}" for key in ("difference", "low", "high"))
    return f"{value} ({low} to {high})"
