"""A paper's JSON file: its tables, the machine and versions, and the command that reproduces it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.paper.ablations import ablation_table, quality_table
from spec_lab.paper.acceptance import acceptance_table, as_tool, difference_table, position_table, tools_table
from spec_lab.paper.drafters import drafter_table
from spec_lab.paper.figures import figures_of
from spec_lab.paper.file import PaperFile
from spec_lab.paper.printed import FORMATS
from spec_lab.paper.provenance import COLUMNS
from spec_lab.paper.reliability import bins_table, reliability_table
from spec_lab.paper.runs import PaperRun
from spec_lab.paper.speed import frontier_table, stage_table
from spec_lab.paper.table import PaperTable, table_from
from spec_lab.record.definitions import DEFINITIONS
from spec_lab.record.sinks import replace_text
from spec_lab.report.origin import describe

JSON_FILE = "paper.json"
LAYOUT = 1


def tables_of(paper: PaperFile, runs: Sequence[PaperRun]) -> list[PaperTable]:
    """Return the tables that the runs have rows for, printed or left out."""
    tables = [
        acceptance_table(runs),
        difference_table(runs, paper.base),
        position_table(runs),
        reliability_table(runs),
        bins_table(runs),
        frontier_table(runs),
        stage_table(runs),
        drafter_table(runs),
        ablation_table(runs, paper.base),
        quality_table(runs),
        tools_table(runs),
    ]
    return [table for table in tables if table.rows or table.left_out]


def content_of(paper: PaperFile, runs: Sequence[PaperRun], command: str) -> dict[str, Any]:
    """Return everything that is printed and drawn, as plain values."""
    summaries = [run.summary for run in runs]
    return {
        "layout": LAYOUT,
        "name": paper.name,
        "command": command,
        "machine": describe(summaries),
        "versions": summaries[-1]["versions"],
        "columns": dict(COLUMNS),
        "definitions": {name: DEFINITIONS[name] for name in ("acceptance_length", "acceptance_rate_by_position")},
        "runs": [
            {"part": run.cell.part, "line": run.cell.line, "task": run.cell.task, "command": list(run.cell.overrides)}
            for run in runs
        ],
        "tables": [table.as_json() for table in tables_of(paper, runs)],
    }


def write_content(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write the JSON, and from it each table in each format and each figure; return the folder.

    All other files are made only from the JSON.
    """
    folder.mkdir(exist_ok=True)
    replace_text(folder / JSON_FILE, json.dumps(content, indent=1))
    tables = read_tables(folder / JSON_FILE)
    for table in tables.values():
        for ending, write in FORMATS.values():
            replace_text(folder / f"{table.name}.{ending}", write(table) + "\n")
    for name, draw in figures_of(tables):
        figure = draw()
        for ending in ("pdf", "svg"):
            figure.savefig(folder / f"{name}.{ending}", bbox_inches="tight")
    return folder


def read_tables(file: Path) -> dict[str, PaperTable]:
    """Return the tables in a JSON file, by name."""
    return {table["name"]: table_from(table) for table in json.loads(file.read_text(encoding="utf-8"))["tables"]}


def printed(file: Path, form: str, tool: str | None) -> str:
    """Return the tables in a JSON file in one of `FORMATS`; with `tool`, only the table of acceptance lengths as that
    tool counts them.

    Raises:
        UserError: there are no acceptance lengths for `tool`.
    """
    tables = read_tables(file)
    if tool is not None and "tools" not in tables:
        raise UserError(f"--as {tool}: no run over the paper's tasks has finished, so there is no length; leave it out")
    chosen = list(tables.values()) if tool is None else [as_tool(tables["tools"], tool)]
    _, write = FORMATS[form]
    return "\n\n".join(write(table) for table in chosen if table.rows)
