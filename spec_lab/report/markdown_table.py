"""Runs as a Markdown table for a document, with machine and versions below: `python -m spec_lab.report --markdown`.

It has only numbers that stay comparable on a busy machine: token counts, and ratios of parts of one run that were
measured in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spec_lab.core.errors import UserError, one_line
from spec_lab.record.paired import over_reference
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.wording import ABSENT, number, percent
from spec_lab.report.bootstrap import bootstrap_acceptance_length
from spec_lab.report.cells import interval_cell, ratio_cell
from spec_lab.report.differing import knob_value, telling_apart
from spec_lab.report.known_options import describe_rule
from spec_lab.report.table import paragraph

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
SHOWN = ("drafter", "prune", "acceptance")
"""The groups that have a column in every table."""
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
    summaries = [run.summary for run in finished]
    rows = [_cells(run) for run in finished]
    more, cells = _more_columns(summaries, rows)
    header = [*HEADER[:TEXT_COLUMNS], *more, *HEADER[TEXT_COLUMNS:]]
    rule = ["---"] * (TEXT_COLUMNS + len(more)) + ["---:"] * (len(HEADER) - TEXT_COLUMNS)
    body = [[*row[:TEXT_COLUMNS], *own, *row[TEXT_COLUMNS:]] for row, own in zip(rows, cells, strict=True)]
    return "\n\n".join(["\n".join(map(_line, [header, rule, *body])), NOTE.strip(), _origin(summaries)])


def _more_columns(summaries: Sequence[Summary], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the groups in which the runs differ, and the knobs that distinguish runs that would otherwise look alike;
    for each run, its cells in these columns."""
    names = dict.fromkeys(name for summary in summaries for name in summary["choices"] if name not in SHOWN)
    groups = [name for name in names if len({summary["choices"].get(name) for summary in summaries}) > 1]
    cells = [[str(summary["choices"].get(name, ABSENT)) for name in groups] for summary in summaries]
    alike = [(*row[: TEXT_COLUMNS + 1], *own) for row, own in zip(rows, cells, strict=True)]
    knobs = telling_apart(summaries, alike)
    values = [[knob_value(summary, knob) for knob in knobs] for summary in summaries]
    of_knobs = [[ABSENT if value is None else str(value) for value in own] for own in values]
    return [*groups, *knobs], [[*own, *more] for own, more in zip(cells, of_knobs, strict=True)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(cell: str) -> str:
    """Escape characters that would end the cell or the line."""
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
