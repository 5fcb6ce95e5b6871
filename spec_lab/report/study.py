"""Shows the gain and cost of lossy rules: runs over the same prompts, each compared with the strict run of the same K.

`python -m spec_lab.report FOLDER` shows it for a sweep that has both, such as `experiment=relaxed_thinking`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spec_lab.core.errors import UserError, visible
from spec_lab.record.answer_metrics import accuracy_change, answers_cut
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.runs import Run
from spec_lab.record.schema import Accuracy, AccuracyChange, Summary
from spec_lab.record.wording import ABSENT, number, percent
from spec_lab.report.bootstrap import Interval, bootstrap_acceptance_length
from spec_lab.report.cells import accuracy_cell, interval_cell
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.known_options import STRICT, describe_rule
from spec_lab.report.table import format_table, paragraph

NOTE = """\
95 % intervals: acceptance length by bootstrap over requests, accuracy by Wilson's score, difference in percentage
points to strict at the same K paired by prompt (answers lost and gained); equal to strict token by token."""
NOT_COMPARED = (*BESIDE_THE_RUN, "num_threads")
"""Keys in which runs may differ whose acceptance and answers are compared. Times depend on threads too."""
UNKNOWN = Accuracy(value=None, low=None, high=None, n=0)
"""The accuracy where all checked outputs were cut off before their answers."""


@dataclass(frozen=True, slots=True)
class Point:
    """One rule at one K.

    Attributes:
        rule: its name, such as `top 10, delta 0.6`.
        family: the rule without its threshold, such as `top 10, delta`.
        threshold: None for a rule without one.
        acceptance_length: pooled, with its bootstrap interval over requests; None if too few drafts were judged.
        change: change of the accuracy from strict at the same K, paired by prompt; None for strict itself, if no answer
            was checked in both, or if all outputs were cut off without a right answer.
        equal_to_strict: share of outputs that equal strict's, token by token.
        thinking_tokens: mean over requests.
        hits_per_1000_tokens: accepted drafts that were not the argmax, for each 1000 tokens emitted in rounds.
        summary: of the run.
    """

    rule: str
    family: str
    threshold: float | None
    num_draft_tokens: int
    acceptance_length: Interval | None
    accuracy: Accuracy
    change: AccuracyChange | None
    equal_to_strict: float
    thinking_tokens: float | None
    hits_per_1000_tokens: float | None
    summary: Summary

    @property
    def is_strict(self) -> bool:
        return self.family == STRICT


class Studies(NamedTuple):
    """The points of each study, and the reason for each run that had to be left out."""

    studies: list[list[Point]]
    left_out: list[str]


def read_studies(runs: Sequence[Run]) -> Studies:
    """Find the studies among `runs`: runs that differ in rule and K alone, with a strict run for the lossy ones.

    There is a point for each lossy run with a strict run of the same K, and for that strict run, sorted by K, strict
    first. Of runs with the same configuration the newest is used.
    Imposed acceptance is left out, since its outputs are not answers. A run whose requests cannot be read or are not
    those of its strict run is left out too, with the reason.
    """
    newest = {
        key_without(run, without=NOT_COMPARED): run
        for run in runs
        if run.summary["status"] == "finished"
        and run.summary["num_draft_tokens"]
        and run.summary["num_requests"]
        and not run.summary["acceptance_imposed"]
    }
    strict = {_at_one_k(run): run for run in newest.values() if describe_rule(run.summary).family == STRICT}
    lossy = [run for run in newest.values() if run.summary["acceptance_lossless"] is False]
    paired = [run for run in lossy if _at_one_k(run) in strict]
    bases = [strict[key] for key in dict.fromkeys(_at_one_k(run) for run in paired)]
    found: dict[str, list[Point]] = {}
    left_out: list[str] = []
    for base in bases:
        points, reasons = _read_points(base, [run for run in paired if _at_one_k(run) == _at_one_k(base)])
        found.setdefault(key_without(base, (*NOT_COMPARED, "acceptance", "num_draft_tokens")), []).extend(points)
        left_out += reasons
    studies = [sorted(points, key=_order) for points in found.values()]
    return Studies([points for points in studies if not all(point.is_strict for point in points)], left_out)


def _read_points(strict: Run, lossy: Sequence[Run]) -> tuple[list[Point], list[str]]:
    """Read the points of one K, and say why some runs have none."""
    try:
        strict_rows = read_all_request_rows(strict.folder, strict.summary)
    except UserError as error:
        return [], [f"nothing is compared with this strict run: {error}"]
    points, left_out = [_point(strict, strict_rows, strict_rows)], []
    for run in lossy:
        try:
            rows = read_all_request_rows(run.folder, run.summary)
            _check_prompts(run, rows, strict, strict_rows)
            points.append(_point(run, rows, strict_rows))
        except UserError as error:
            left_out.append(f"left out of the comparison of rules: {error}")
    return points, left_out


def format_study(points: Sequence[Point]) -> str:
    """Write the drafter and the pruning, and the table with a line for each point."""
    header = [
        "K", "rule", "acceptance length", "accuracy", "difference to strict", "lost", "gained", "thinking tokens",
        "equal to strict", "relaxed hits a 1000 tokens",
    ]  # fmt: skip
    body = [
        [
            str(point.num_draft_tokens),
            point.rule,
            interval_cell(point.acceptance_length),
            accuracy_cell(point.accuracy),
            *_change(point.change),
            number(point.thinking_tokens, 1),
            percent(point.equal_to_strict),
            number(point.hits_per_1000_tokens, 1),
        ]
        for point in points
    ]
    table = format_table(header, body, left=("rule",), num_keys=2)
    heading = visible(f"What lossy acceptance costs and brings: {subject_of(points)}")
    return "\n\n".join([heading, table, paragraph(NOTE)])


def subject_of(points: Sequence[Point]) -> str:
    """Return what the points have in common, such as `drafter=eagle3, prune=catchup`."""
    choices = points[0].summary["choices"] if points else {}
    return ", ".join(f"{group}={choices[group]}" for group in ("target", "drafter", "prune") if group in choices)


def _check_prompts(run: Run, rows: Sequence[RequestRow], strict: Run, strict_rows: Sequence[RequestRow]) -> None:
    prompts, strict_prompts = ({row["id"]: row["prompt_ids"] for row in part} for part in (rows, strict_rows))
    if prompts != strict_prompts:
        raise UserError(
            f"{run.folder}: its prompts differ from those of its strict run, {strict.folder}; run the whole sweep again"
        )


def _point(run: Run, rows: Sequence[RequestRow], strict_rows: Sequence[RequestRow]) -> Point:
    summary = run.summary
    rule, family, threshold = describe_rule(summary)
    strict = {row["id"]: row for row in strict_rows}
    correct, strict_correct = ({row["id"]: row["correct"] for row in part} for part in (rows, strict_rows))
    thinking, relaxed, is_cut = summary["thinking"], summary["relaxed"], answers_cut(summary, summary)
    num_equal = sum(row["output_ids"] == strict[row["id"]]["output_ids"] for row in rows)
    return Point(
        rule=rule,
        family=family,
        threshold=threshold,
        num_draft_tokens=summary["num_draft_tokens"] or 0,
        acceptance_length=bootstrap_acceptance_length(rows, summary["num_draft_tokens"] or 0),
        accuracy=UNKNOWN if is_cut else summary["accuracy"],
        change=None if family == STRICT or is_cut else accuracy_change(correct, strict_correct, over=STRICT),
        equal_to_strict=num_equal / len(rows),
        thinking_tokens=None if thinking is None else thinking["mean_tokens"],
        hits_per_1000_tokens=None if relaxed is None else relaxed["per_1000_tokens"],
        summary=summary,
    )


def _order(point: Point) -> tuple[int, bool, str, float, str]:
    """Return the sort key: K, strict first, family, threshold. A family's top-k sorts as a number (`top 3`, `top
    10`)."""
    family = re.sub(r"\d+", lambda digits: digits.group().zfill(4), point.family)
    return point.num_draft_tokens, not point.is_strict, family, point.threshold or 0.0, point.rule


def _at_one_k(run: Run) -> str:
    return key_without(run, (*NOT_COMPARED, "acceptance"))


def key_without(run: Run, without: Collection[str]) -> str:
    """Return a string that is equal for two runs whose configurations and drafters differ only in the keys
    `without`."""
    config = dict(run.summary["config"])
    config["drafter"] = {key: value for key, value in config.get("drafter", {}).items() if key not in without}
    return json.dumps({key: value for key, value in config.items() if key not in without}, sort_keys=True)


def _change(change: AccuracyChange | None) -> list[str]:
    """Return cells: difference in percentage points with its interval, answers lost, answers gained."""
    if change is None:
        return [ABSENT] * 3
    value, low, high = (f"{100 * change[key]:+.1f}" for key in ("difference", "low", "high"))
    return [f"{value} ({low} to {high})", str(change["lost"]), str(change["gained"])]
