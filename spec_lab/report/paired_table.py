"""Compares runs with one of them: is a difference more than noise?

Acceptance lengths are compared with a bootstrap over prompts, prompt by prompt where both runs have them. Decode rates
of two runs are not compared, since the machine may have changed in between. Speedups are compared where each run
measured plain decoding in turns with its own rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_lab.core.errors import UserError, one_line
from spec_lab.record.mixed import are_mixed
from spec_lab.record.paired import LEAST_TURNS, PairedRatio, over_reference
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.schema import Summary
from spec_lab.record.wording import ABSENT, number
from spec_lab.report.bootstrap import NUM_RESAMPLES, SEED, Interval, bootstrap_acceptance_length, bootstrap_difference
from spec_lab.report.cells import interval_cell, ratio_cell
from spec_lab.report.comparable import NumberedRun
from spec_lab.report.known_options import describe_rule
from spec_lab.report.table import format_table, paragraph

NOTE = f"""\
difference: acceptance length less that of the base, with the 95 % interval of a bootstrap over prompts
({NUM_RESAMPLES} resamples, seed {SEED}); paired: both runs are resampled together; within noise: the interval holds
0. speedup to base's: each run's decode rate over that of its own plain decoding, turn by turn, over the same of the
base, with Welch's 95 % interval over turns; within noise: it holds 1; not judged under {LEAST_TURNS} turns. --base
NUMBER chooses another base."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One run compared with the base.

    Attributes:
        length: acceptance length over all of its prompts.
        difference: acceptance length minus that of the base; None if too few drafts were judged, and for the base
            itself.
        num_prompts: number of prompts that the difference is taken over.
        is_paired: whether these prompts are the same in both runs.
        speedup: speedup over plain decoding, divided by that of the base; None for the base, and if `no_match` is set.
        no_match: why the two speedups are not compared.
    """

    run: NumberedRun
    length: Interval | None
    difference: Interval | None
    num_prompts: int
    is_paired: bool
    speedup: PairedRatio | None
    no_match: str = ""

    @property
    def length_verdict(self) -> str:
        """Return the result of comparing acceptance lengths, in a word or two."""
        if self.difference is None:
            return ABSENT
        if self.difference.low is None:
            return "not judged"
        if self.difference.holds_zero:
            return "within noise"
        return "longer" if self.difference.value > 0 else "shorter"

    @property
    def speedup_verdict(self) -> str:
        """Return the result of comparing speedups, in a word or two."""
        if self.speedup is None:
            return self.no_match or ABSENT
        if not self.speedup.is_judged:
            return "not judged"
        if self.speedup.is_noise:
            return "within noise"
        return "higher" if self.speedup.is_above else "lower"


def is_measured(run: NumberedRun) -> bool:
    """Return whether there is an acceptance length to compare."""
    summary = run.run.summary
    return summary["status"] == "finished" and bool(summary["num_draft_tokens"]) and bool(summary["num_requests"])


def compare(runs: Sequence[NumberedRun], base: int | None = None) -> tuple[list[Compared], list[str]]:
    """Compare the measured runs with one of them, which comes first; with fewer than two there is no comparison. Also
    return why some runs cannot be read.

    Args:
        base: number of the run that the others are compared with; if it is None or not among them, the first is used.
    """
    rows: dict[int, list[RequestRow]] = {}
    left_out: list[str] = []
    for run in filter(is_measured, runs):
        try:
            rows[run.number] = read_all_request_rows(run.run.folder, run.run.summary)
        except UserError as error:
            left_out.append(str(error))
    readable = [run for run in runs if run.number in rows]
    if len(readable) < 2:
        return [], left_out
    first = next((run for run in readable if run.number == base), readable[0])
    others = [run for run in readable if run is not first]
    return [_compare_one(run, first, rows[run.number], rows[first.number]) for run in [first, *others]], left_out


def format_compared(compared: Sequence[Compared]) -> str:
    """Write the title, the table and the meanings of its columns."""
    base = compared[0].run
    header, body = compared_cells(compared)
    title = one_line(f"Against {base.label}, {base.run.folder}")
    return "\n\n".join([title, format_table(header, body, left=("#", "drafter", "rule")), paragraph(NOTE)])


def compared_cells(compared: Sequence[Compared]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells, one row for each run, the base first."""
    header = [
        "#", "drafter", "K", "rule", "acceptance length", "difference", "prompts", "difference is",
        "speedup to base's", "speedup is",
    ]  # fmt: skip
    return header, [_cells(row, is_base=row is compared[0]) for row in compared]


def _cells(row: Compared, is_base: bool) -> list[str]:
    summary = row.run.run.summary
    prompts = f"{row.num_prompts}{'' if row.is_paired else ' unpaired'}"
    return [
        row.run.label,
        summary["choices"].get("drafter", ABSENT),
        str(summary["num_draft_tokens"]),
        describe_rule(summary).rule,
        interval_cell(row.length) + ("*" if summary["acceptance_imposed"] else ""),
        "base" if is_base else _signed(row.difference),
        prompts,
        "" if is_base else row.length_verdict,
        "base" if is_base else ratio_cell(row.speedup),
        "" if is_base else row.speedup_verdict,
    ]


def _compare_one(
    run: NumberedRun, base: NumberedRun, rows: Sequence[RequestRow], base_rows: Sequence[RequestRow]
) -> Compared:
    num_draft_tokens, base_k = (part.run.summary["num_draft_tokens"] or 0 for part in (run, base))
    known = {(row["id"], tuple(row["prompt_ids"])): row for row in base_rows}
    shared = [row for row in rows if (row["id"], tuple(row["prompt_ids"])) in known]
    is_paired = bool(shared)
    mine = shared if is_paired else rows
    theirs = [known[row["id"], tuple(row["prompt_ids"])] for row in shared] if is_paired else base_rows
    is_base = run is base
    no_match = "" if is_base else _no_match(run.run.summary, base.run.summary)
    return Compared(
        run,
        bootstrap_acceptance_length(rows, num_draft_tokens),
        None if is_base else bootstrap_difference(mine, num_draft_tokens, theirs, base_k, is_paired),
        len(mine),
        is_paired,
        None if is_base or no_match else _speedup_to(run.run.summary, base.run.summary),
        no_match,
    )


def _no_match(summary: Summary, base: Summary) -> str:
    """Return why two speedups must not be compared: another device, dtype or number of threads, other choices by
    `auto`, or no plain decoding; else empty."""
    places = [(s["device_name"], s["dtype"], s["num_threads"]) for s in (summary, base)]
    if places[0] != places[1]:
        return "other device, dtype or threads"
    if are_mixed(summary["config"], base["config"]):
        return "other auto options"
    return "" if _speedup_to(summary, base) is not None else "no plain beside"


def _speedup_to(summary: Summary, base: Summary) -> PairedRatio | None:
    ours, theirs = (over_reference(part, part, "plain") for part in (summary, base))
    return None if ours is None or theirs is None else ours.over(theirs)


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return ABSENT
    value = f"{interval.value:+,.2f}"
    return value if interval.low is None else f"{value} ({number(interval.low)} to {number(interval.high)})"
