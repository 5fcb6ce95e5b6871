"""Runs as a Markdown table for a document, with machine and versions below: `python -m spec_lab.report --markdown`.

It has only numbers that stay comparable on a busy machine: token counts, and ratios of parts of one run that were
measured in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spec_lab.core.errors import UserError, one_line
from spec_lab.program.table import paragraph
from spec_lab.record.paired import over_reference
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.wording import ABSENT, number, percent
from spec_lab.report.bootstrap import bootstrap_acceptance_length
from spec_lab.report.cells import interval_cell, ratio_cell
from spec_lab.report.known_options import describe_rule

HEADER = (
    "drafter",
    "prune",
    "rule",
    "K",
    "acceptance length",
    "break-even",
    "speedup over plain",
    "outputs equal to plain's",
)
TEXT_COLUMNS = 3
WIDTH = 120
NOTE = """\
*Acceptance length* is tokens a round, with a 95 % bootstrap interval over prompts. *Break-even* is the length from
which drafting pays. *Speedup* is the decode rate over plain decoding's: the geometric mean over turns, with a 95 % t
interval. An interval that holds 1 is within noise.
"""


def format_markdown(runs: Sequence[Run]) -> str:
    """Write the table of the finished runs, followed by two paragraphs.

    Raises:
        UserError: no run has finished, or the requests of one cannot be read.
    """
    finished = [run for run in runs if run.summary["status"] == "finished"]
    if not finished:
        raise UserError("--markdown shows finished runs, but there is none; name another folder")
    rule = ["---"] * TEXT_COLUMNS + ["---:"] * (len(HEADER) - TEXT_COLUMNS)
    lines = [_line(HEADER), _line(rule), *(_line(_cells(run)) for run in finished)]
    return "\n\n".join(["\n".join(lines), NOTE.strip(), _origin([run.summary for run in finished])])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(cell: str) -> str:
    """Escape what would end the cell or the line."""
    return one_line(cell).replace("|", r"\|")


def _cells(run: Run) -> list[str]:
    summary = run.summary
    num_draft_tokens = summary["num_draft_tokens"] or 0
    rows = read_all_request_rows(run.folder, summary)
    length = bootstrap_acceptance_length(rows, num_draft_tokens) if num_draft_tokens else None
    imposed = "*" if summary["acceptance_imposed"] else ""
    return [
        summary["choices"].get("drafter", ABSENT),
        summary["choices"].get("prune", ABSENT),
        describe_rule(summary).rule,
        str(num_draft_tokens),
        interval_cell(length) + (imposed if length is not None else ""),
        number(summary["break_even_acceptance_length"]),
        ratio_cell(over_reference(summary, summary, "plain")),
        percent(summary["equal_to_plain"], 0),
    ]


def _origin(summaries: Sequence[Summary]) -> str:
    """Return the target, prompts, machine, versions and day of the runs; several of each where they differ."""

    def all_of(value: Callable[[Summary], object]) -> str:
        return " and ".join(dict.fromkeys(str(value(summary)) for summary in summaries))

    target, batch = (all_of(lambda s: s["choices"].get("target", ABSENT)), all_of(_batch_size))
    prompts, repeats = (all_of(lambda s: s["num_requests"]), all_of(lambda s: len(s["repeats"])))
    machine = ", ".join(all_of(value) for value in (lambda s: s["device_name"], lambda s: s["dtype"]))
    threads, torch = (all_of(lambda s: s["num_threads"]), all_of(lambda s: s["versions"].get("torch")))
    day = all_of(lambda s: s["started_at"][:10])
    return paragraph(
        f"Target {target}, {prompts} prompts, batch {batch}, {repeats} repeats; {machine}, threads {threads}; torch "
        f"{torch}, revision {all_of(_revision)}; {day}.",
        WIDTH,
    )


def _batch_size(summary: Summary) -> object:
    return summary["config"].get("batch_size", ABSENT)


def _revision(summary: Summary) -> str:
    commit, changed, _ = (summary["git_revision"] or "unknown").partition("+")
    return commit[:7] + (" with changes" if changed else "")
