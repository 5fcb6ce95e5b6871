"""Runs against one of them: is a difference more than noise?

Acceptance lengths are compared prompt by prompt, with a bootstrap over prompts. Decode rates of two runs are no pairs:
the machine may have changed in between, so their range is over all combinations of repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_lab.errors import UserError, one_line
from spec_lab.record.mixed import are_mixed
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.schema import Ratio, Summary
from spec_lab.record.verdict import JUDGED_REPEATS, is_noise
from spec_lab.record.wording import ABSENT, number, with_range
from spec_lab.report.bootstrap import NUM_RESAMPLES, SEED, Interval, bootstrap_acceptance_length, bootstrap_difference
from spec_lab.report.cells import interval_cell
from spec_lab.report.comparable import NumberedRun
from spec_lab.report.known_options import describe_rule
from spec_lab.report.table import format_table, paragraph

NOTE = f"""\
difference: acceptance length less that of the base, with the 95 % interval of a bootstrap over prompts ({NUM_RESAMPLES}
resamples, seed {SEED}); paired: both runs are resampled together; within noise: the interval holds 0. rate: decode rate
over the base's, in brackets over all combinations of repeats; within noise: no farther from 1 than that range is wide,
and not judged under {JUDGED_REPEATS} repeats; none on another device, or where auto took other options. --base NUMBER
chooses another base."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One run against the base.

    Attributes:
        length: acceptance length over all of its prompts.
        difference: None where too little was judged, and for the base itself.
        num_prompts: over which the difference is.
        is_paired: those prompts are the same in both.
        rate: decode rate over the base's; None on another device, where auto took other options, and for the base.
    """

    run: NumberedRun
    length: Interval | None
    difference: Interval | None
    num_prompts: int
    is_paired: bool
    rate: Ratio | None

    @property
    def length_verdict(self) -> str:
        """Says it in a word or two."""
        if self.difference is None:
            return ABSENT
        if self.difference.holds_zero:
            return "within noise"
        return "longer" if self.difference.value > 0 else "shorter"

    @property
    def rate_verdict(self) -> str:
        """Says it in a word or two."""
        if self.rate is None:
            return ABSENT
        if len(self.run.run.summary["repeats"]) < JUDGED_REPEATS:
            return "not judged"
        if is_noise(self.rate):
            return "within noise"
        return "faster" if self.rate["value"] > 1 else "slower"


def is_measured(run: NumberedRun) -> bool:
    """Tell whether there is an acceptance length to compare."""
    summary = run.run.summary
    return summary["status"] == "finished" and bool(summary["num_draft_tokens"]) and bool(summary["num_requests"])


def compare(runs: Sequence[NumberedRun], base: int | None = None) -> tuple[list[Compared], list[str]]:
    """Set the measured runs against one of them, which comes first; for those that cannot be read, give the reason.

    Args:
        base: number of the run that the others are compared with; the first where it is None or not among them.
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
    """Write title, table and what the columns mean."""
    base = compared[0].run
    header = [
        "#", "drafter", "K", "rule", "acceptance length", "difference", "prompts", "difference is", "decode rate",
        "rate is",
    ]  # fmt: skip
    body = [_cells(row, is_base=row is compared[0]) for row in compared]
    title = one_line(f"Against {base.label}, {base.run.folder}")
    return "\n\n".join([title, format_table(header, body, left=("#", "drafter", "rule")), paragraph(NOTE)])


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
        "base" if is_base else ABSENT if row.rate is None else with_range(*_of(row.rate)),
        "" if is_base else row.rate_verdict,
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
    return Compared(
        run,
        bootstrap_acceptance_length(rows, num_draft_tokens),
        None if is_base else bootstrap_difference(mine, num_draft_tokens, theirs, base_k, is_paired),
        len(mine),
        is_paired,
        None if is_base else decode_rate_over(run.run.summary, base.run.summary),
    )


def decode_rate_over(summary: Summary, base: Summary) -> Ratio | None:
    """Decode rate over that of another run on the same device; the range is over all combinations of repeats.

    None where auto took other options for the one than for the other: that is not what the runs were to differ in.
    """
    places = [(s["device_name"], s["dtype"], s["num_threads"]) for s in (summary, base)]
    value, base_value = summary["decode_tokens_per_second"], base["decode_tokens_per_second"]
    if places[0] != places[1] or are_mixed(summary["config"], base["config"]) or value is None or not base_value:
        return None
    rates, base_rates = ([r["decode_tokens_per_second"] for r in part["repeats"]] for part in (summary, base))
    known, base_known = [rate for rate in rates if rate], [rate for rate in base_rates if rate]
    if not known or not base_known:
        return None
    return Ratio(
        value=value / base_value, low=min(known) / max(base_known), high=max(known) / min(base_known), over="base"
    )


def _of(ratio: Ratio) -> tuple[float, float, float]:
    return ratio["value"], ratio["low"], ratio["high"]


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return ABSENT
    return f"{interval.value:+,.2f} ({number(interval.low)} to {number(interval.high)})"
