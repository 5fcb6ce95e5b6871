"""The finished runs of a paper with their requests by task, as the tables need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spec_lab.paper.plan import Part, PlannedCell
from spec_lab.paper.provenance import provenance_of
from spec_lab.paper.study import Ended
from spec_lab.paper.table import TableRow, Value
from spec_lab.record.reading import read_all_request_rows, read_summary
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.schema import Summary
from spec_lab.report.bootstrap import TaskRows


@dataclass(frozen=True, slots=True)
class PaperRun:
    """A finished run of a paper."""

    cell: PlannedCell
    summary: Summary
    rows: Sequence[RequestRow]

    @property
    def num_draft_tokens(self) -> int:
        return self.summary["num_draft_tokens"] or 0

    @property
    def provenance(self) -> dict[str, str | None]:
        return provenance_of(self.summary)

    def of_tasks(self) -> dict[str, TaskRows]:
        """Return the requests by task. If the task's prompts have several categories, each is a task named after
        both."""
        categories = sorted({row["category"] for row in self.rows})
        if len(categories) == 1:
            return {self.cell.task: TaskRows(self.rows, self.num_draft_tokens)}
        return {
            f"{self.cell.task}: {category}": TaskRows(
                [row for row in self.rows if row["category"] == category], self.num_draft_tokens
            )
            for category in categories
        }


@dataclass(frozen=True, slots=True)
class LineRuns:
    """The runs of one line at one temperature, over all tasks that finished."""

    line: str
    temperature: float
    runs: Sequence[PaperRun]

    @property
    def provenance(self) -> dict[str, str | None]:
        """Return the runs' common provenance; None for a column in which they differ, so that the row is not
        printed."""
        each = [run.provenance for run in self.runs]
        return {name: each[0][name] if len({one[name] for one in each}) == 1 else None for name in each[0]}

    def row(self, values: Mapping[str, Value]) -> TableRow:
        """Make a table row for this line, with these values."""
        return TableRow({"temperature": self.temperature, "line": self.line, **values}, self.provenance)

    def of_tasks(self) -> dict[str, TaskRows]:
        """Return the requests by task."""
        return {task: rows for run in self.runs for task, rows in run.of_tasks().items()}


def finished_runs(ended: Sequence[Ended]) -> list[PaperRun]:
    """Read the finished runs among those that ended, with their requests."""
    found: list[PaperRun] = []
    for each in ended:
        folder = each.folder
        if folder is not None and each.status == "finished":
            summary = read_summary(folder)
            found.append(PaperRun(each.cell, summary, read_all_request_rows(folder, summary)))
    return found


def of_part(runs: Sequence[PaperRun], part: Part) -> Iterator[LineRuns]:
    """Yield the lines of a part, separately for each temperature, in the order of the list."""
    places = dict.fromkeys((run.cell.temperature, run.cell.line) for run in runs if run.cell.part == part)
    for temperature, line in places:
        alike = [
            run
            for run in runs
            if run.cell.part == part and run.cell.line == line and run.cell.temperature == temperature
        ]
        yield LineRuns(line, temperature, alike)
