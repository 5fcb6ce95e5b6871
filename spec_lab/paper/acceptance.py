"""The tables of acceptance: by task and temperature, compared with the base, by position, and as other tools count
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from spec_lab.paper.file import MEAN
from spec_lab.paper.lengths import LENGTHS
from spec_lab.paper.reliability import CONFIDENCE, ERROR, ERROR_NOTE, NONE_NOTE, by_position, judged_drafts
from spec_lab.paper.runs import LineRuns, PaperRun, of_part
from spec_lab.paper.table import HEAT, LINE, TASK, PaperTable, TableColumn, TableRow, Value, table_of
from spec_lab.record.draft_counts import DraftCounts
from spec_lab.report.bootstrap import NUM_RESAMPLES, Interval, TaskRows, bootstrap_mean

LENGTH = TableColumn("length", "acceptance length", 2, interval=True)
DIFFERENCE = TableColumn("difference", "difference", 2, interval=True, signed=True)
PROMPTS = TableColumn("prompts", "prompts", 0)
ALL_NOTE = (
    "Acceptance length: tokens of a request round, including the bonus or correction token, pooled over a task's "
    f"prompts, with the 95 % interval of a bootstrap over prompts ({NUM_RESAMPLES} resamples). mean: the mean over "
    "tasks."
)


def acceptance_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return a row for each line, temperature and task, and one for the mean over several tasks."""
    rows = [row for line in of_part(runs, "acceptance") for row in _length_rows(line)]
    return table_of(
        "acceptance", "Acceptance length by task and temperature", [HEAT, LINE, TASK, LENGTH, PROMPTS],
        ("temperature", "line", "task"), rows, ALL_NOTE, across="task", shown="length",
    )  # fmt: skip


def difference_table(runs: Sequence[PaperRun], base: str) -> PaperTable:
    """Return such rows for the other lines where the base has a run, with the difference over the same prompts."""
    lines = list(of_part(runs, "acceptance"))
    bases = {line.temperature: line for line in lines if line.line == base}
    rows = [
        row
        for line in lines
        if line.line != base and line.temperature in bases
        for row in _difference_rows(line, bases[line.temperature])
    ]
    note = (
        f"Acceptance length minus that of {base} over the same prompts, which are resampled together. An interval that "
        "includes 0 is within noise."
    )
    return table_of(
        "difference", f"Acceptance length against {base}", [HEAT, LINE, TASK, DIFFERENCE, PROMPTS],
        ("temperature", "line", "task"), rows, note, across="task", shown="difference",
    )  # fmt: skip


def position_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return acceptance by draft position, conditional and joint, pooled over all tasks."""
    rows = [row for line in of_part(runs, "acceptance") for row in _position_rows(line)]
    columns = [
        HEAT,
        LINE,
        TableColumn("position", "position", 0),
        TableColumn("conditional", "conditional", 3),
        TableColumn("joint", "joint", 3),
        TableColumn("reached", "reached", 0),
        CONFIDENCE,
        ERROR,
    ]
    note = (
        "Conditional: accepted share of the drafts whose earlier drafts were all accepted. Joint: share of request "
        "rounds that accept the draft; 1 + their sum is the acceptance length. Reached: the number of drafts that "
        "conditional is a share of. Confidence: the mean of the drafter's estimates that an offered draft and all "
        f"before it are accepted. {ERROR_NOTE} {NONE_NOTE} Pooled over all tasks."
    )
    keys = ("temperature", "line", "position")
    return table_of("position", "Acceptance by draft position", columns, keys, rows, note)


def tools_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return acceptance lengths as other tools count them, from the same rounds."""
    rows = [row for line in of_part(runs, "acceptance") for row in _tool_rows(line)]
    columns = [
        HEAT,
        LINE,
        TASK,
        TableColumn("spec_lab", "spec_lab", 3),
        *(TableColumn(name, name, 3) for name in LENGTHS),
    ]
    note = "The same rounds, counted as each tool counts them; docs/paper.md has the formulas."
    return table_of("tools", "Acceptance length by tool", columns, ("temperature", "line", "task"), rows, note)


def as_tool(table: PaperTable, tool: str) -> PaperTable:
    """Return the table of one tool's lengths, with a column for each task."""
    columns = [HEAT, LINE, TASK, TableColumn(tool, f"acceptance length as {tool} counts it", 2)]
    return PaperTable(
        f"acceptance_as_{tool}", f"Acceptance length by task and temperature, as {tool} counts it", columns,
        table.keys, table.rows, table.note, "task", tool, table.left_out,
    )  # fmt: skip


def _length_rows(line: LineRuns) -> list[TableRow]:
    tasks = line.of_tasks()
    found = {task: bootstrap_mean([rows]) for task, rows in tasks.items()}
    if len(tasks) > 1:
        found[MEAN] = bootstrap_mean(list(tasks.values()))
    counts = {task: len(rows.rows) for task, rows in tasks.items()}
    counts[MEAN] = sum(counts.values())
    return [
        line.row({"task": task, "prompts": counts[task], **ends_of("length", length)}) for task, length in found.items()
    ]


def _difference_rows(line: LineRuns, base: LineRuns) -> list[TableRow]:
    shared = shared_prompts(line.of_tasks(), base.of_tasks())
    found = {task: bootstrap_mean([ours], [theirs]) for task, (ours, theirs) in shared.items()}
    if len(shared) > 1:
        ours, theirs = zip(*shared.values(), strict=True)
        found[MEAN] = bootstrap_mean(ours, theirs)
    counts = {task: len(ours.rows) for task, (ours, _) in shared.items()}
    counts[MEAN] = sum(counts.values())
    return [
        line.row({"task": task, "prompts": counts[task], **ends_of("difference", difference)})
        for task, difference in found.items()
    ]


def shared_prompts(
    ours: Mapping[str, TaskRows], theirs: Mapping[str, TaskRows]
) -> dict[str, tuple[TaskRows, TaskRows]]:
    """Return, for each task with shared prompts, the requests of both sides for these, in the same order."""
    shared: dict[str, tuple[TaskRows, TaskRows]] = {}
    for task in (task for task in ours if task in theirs):
        known = {(row["id"], tuple(row["prompt_ids"])): row for row in theirs[task].rows}
        mine = [row for row in ours[task].rows if (row["id"], tuple(row["prompt_ids"])) in known]
        base = [known[row["id"], tuple(row["prompt_ids"])] for row in mine]
        if mine:
            shared[task] = (
                TaskRows(mine, ours[task].num_draft_tokens),
                TaskRows(base, theirs[task].num_draft_tokens),
            )
    return shared


def _position_rows(line: LineRuns) -> list[TableRow]:
    most = max(run.num_draft_tokens for run in line.runs)
    counts = DraftCounts.empty(most)
    for run in line.runs:
        counts.add(pooled_counts(TaskRows(run.rows, most)))
    drafts = [draft for run in line.runs for draft in judged_drafts(run.rows)]
    return [
        line.row(
            {"position": place, "conditional": conditional, "joint": joint, "reached": reached}
            | by_position(drafts, place)
        )
        for place, (conditional, joint, reached) in enumerate(
            zip(counts.conditional, counts.unconditional, counts.offered, strict=True), start=1
        )
    ]


def pooled_counts(task: TaskRows) -> DraftCounts:
    """Return the pooled counts of reached and accepted drafts, given the drafts that each round offered."""
    rounds: list[tuple[int, ...]] = []
    for row in task.rows:
        offered = row["offered_per_round"] or [task.num_draft_tokens] * len(row["accepted_per_round"])
        rounds += zip(row["accepted_per_round"], row["judged_per_round"], offered, strict=True)
    return DraftCounts.of(rounds, task.num_draft_tokens)


def _tool_rows(line: LineRuns) -> list[TableRow]:
    tasks = line.of_tasks()
    found = {task: _by_tool(part) for task, part in tasks.items()}
    if len(tasks) > 1:
        found[MEAN] = {name: mean_of([each[name] for each in found.values()]) for name in ("spec_lab", *LENGTHS)}
    return [line.row({"task": task, **lengths}) for task, lengths in found.items()]


def _by_tool(task: TaskRows) -> dict[str, float | None]:
    return {
        "spec_lab": pooled_counts(task).acceptance_length,
        **{name: count(task.rows) for name, count in LENGTHS.items()},
    }


def ends_of(key: str, interval: Interval | None) -> dict[str, Value]:
    """Return a value and the ends of its interval under the keys of an interval column."""
    if interval is None:
        return {key: None, f"{key}_low": None, f"{key}_high": None}
    return {key: interval.value, f"{key}_low": interval.low, f"{key}_high": interval.high}


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean; None without values, or if one is missing, since a mean over fewer would not be comparable."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
