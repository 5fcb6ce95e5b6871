"""The tables of ablations compared with the base, and of outputs compared with plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from spec_lab.paper.acceptance import DIFFERENCE, LENGTH, ends_of, mean_of, shared_prompts
from spec_lab.paper.runs import LineRuns, PaperRun, of_part
from spec_lab.paper.table import HEAT, LINE, PaperTable, TableColumn, TableRow, table_of
from spec_lab.record.paired import over_reference
from spec_lab.record.time_metrics import draft_ms
from spec_lab.report.bootstrap import bootstrap_mean
from spec_lab.report.drafter_table import COLUMNS_EXPLAINED


def ablation_table(runs: Sequence[PaperRun], base: str) -> PaperTable:
    """Return rows for the base and the ablations at each temperature that both have: mean over tasks, difference from
    the base over the same prompts, speedup over plain."""
    bases = {line.temperature: line for line in of_part(runs, "acceptance") if line.line == base}
    ablations = [line for line in of_part(runs, "ablation") if line.temperature in bases]
    whole = [bases[heat] for heat in dict.fromkeys(line.temperature for line in ablations)]
    rows = [_ablation_row(line, bases[line.temperature]) for line in [*whole, *ablations]]
    speedup = TableColumn("speedup", "speedup", 2)
    draft = TableColumn("draft_ms", "draft ms", 3)
    note = (
        f"Each line names its differences from {base}. Difference: that of the mean over tasks, paired by prompt. "
        "Speedup: decode rate over plain decoding's, geometric mean over tasks. " + COLUMNS_EXPLAINED["draft ms"]
    )
    columns = [HEAT, LINE, LENGTH, DIFFERENCE, speedup, draft]
    return table_of("ablations", "Ablations", columns, ("temperature", "line"), rows, note)


def _ablation_row(line: LineRuns, base: LineRuns) -> TableRow:
    shared = shared_prompts(line.of_tasks(), base.of_tasks())
    difference = None
    if line is not base and shared:
        ours, theirs = zip(*shared.values(), strict=True)
        difference = bootstrap_mean(ours, theirs)
    length = bootstrap_mean(list(line.of_tasks().values()))
    return line.row(
        {
            **ends_of("length", length),
            **ends_of("difference", difference),
            "speedup": _geometric([_speedup(run) for run in line.runs]),
            "draft_ms": mean_of([draft_ms(run.summary) for run in line.runs]),
        },
    )


def quality_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return the share of outputs that equal plain decoding's, and of answers that are right, over all tasks."""
    rows = [_quality_row(line) for line in of_part(runs, "acceptance")]
    columns = [HEAT, LINE, TableColumn("equal", "equal to plain's", 3), TableColumn("right", "right answers", 3)]
    columns += [TableColumn("checked", "answers checked", 0), TableColumn("cut", "cut by the limit", 0)]
    note = (
        "Equal to plain's: share of outputs that equal plain decoding's token for token, in greedy runs. An output "
        "that the limit cut off before its answer counts as wrong; if all were cut off, there is no share."
    )
    return table_of("quality", "Outputs and answers", columns, ("temperature", "line"), rows, note)


def _quality_row(line: LineRuns) -> TableRow:
    summaries = [run.summary for run in line.runs]
    equal = [(s["equal_to_plain"], s["num_requests"]) for s in summaries]
    known = [(share, count) for share, count in equal if share is not None]
    answers = [s["accuracy"] for s in summaries if s["accuracy"]["value"] is not None]
    checked = sum(answer["n"] for answer in answers)
    right = sum((answer["value"] or 0.0) * answer["n"] for answer in answers)
    cut = sum(answer.get("cut", 0) for answer in answers)
    return line.row(
        {
            "equal": sum(s * n for s, n in known) / sum(n for _, n in known) if len(known) == len(equal) else None,
            "right": right / checked if checked > cut else None,
            "checked": checked,
            "cut": cut,
        },
    )


def _speedup(run: PaperRun) -> float | None:
    ratio = over_reference(run.summary, run.summary, "plain")
    return None if ratio is None else ratio.value


def _geometric(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return geometric_mean(known) if known and len(known) == len(values) else None
