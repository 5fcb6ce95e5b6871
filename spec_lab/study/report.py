"""What a report of some runs consists of: sections with tables and figures, for a terminal, a page or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_lab.record.models import Run
from spec_lab.record.reading import Found
from spec_lab.record.summary import definitions
from spec_lab.study import figures
from spec_lab.study.compare import comparison_table, cost_table, drafting, rule_table
from spec_lab.study.engines import engines_table, has_other_engines
from spec_lab.study.figures import Draw, described
from spec_lab.study.frame import frame
from spec_lab.study.page import Section
from spec_lab.study.run_table import runs_table, tables_of_run
from spec_lab.study.studies import studies_in, study_figures, study_tables
from spec_lab.study.tables import Table, joined, paragraph


@dataclass(frozen=True, slots=True)
class Report:
    """The sections of a report; `newest` is the newest finished run, whose own tables come last."""

    title: str
    under: str
    sections: list[Section]
    main_tables: list[Table]
    definitions: dict[str, str] = field(default_factory=dict)
    newest: Run | None = None

    @property
    def figures(self) -> dict[str, Draw]:
        """Return all figures, not drawn yet, by name."""
        return {name: draw for section in self.sections for name, draw in (section.figures or {}).items()}

    def text(self) -> str:
        """Return it for a terminal."""
        parts = [paragraph(self.under)]
        for section in self.sections:
            parts += [f"== {section.title} ==", *([paragraph(section.text)] if section.text else [])]
            parts += [table.text() for table in section.tables]
        return "\n\n".join([*parts, "python -m spec_lab.report --definitions explains every number"])


def report_of(runs: Sequence[Found], base: int = 1) -> Report:
    """Make the report of some runs: all runs, the studies among them, the comparison of those that drafted, and the
    newest finished run.

    Args:
        base: the number of the run that others are compared with, from 1.
    """
    finished = [found for found in runs if found.run.status == "finished"]
    overview = runs_table(runs)
    beside_lab = [engines_table(runs)] if has_other_engines(runs) else []
    sections, studies = [Section("Runs", [overview, *beside_lab])], studies_in(runs)
    study_parts = []
    for number, (spec, of_study) in enumerate(studies):
        tables = study_tables(spec, of_study)
        study_parts += tables
        mark = f"{number + 1}_" if len(studies) > 1 else ""
        drawings = {f"{mark}{name}": draw for name, draw in study_figures(spec, of_study).items()}
        question = "" if tables[0].title == spec["question"] else spec["question"]
        sections.append(Section(of_study[0].run.name, tables, drawings, question))
    measured = drafting(runs)
    if len(measured) > 1 and not studies:
        tables = [comparison_table(runs, base), cost_table(runs), rule_table(runs)]
        rows = frame(measured)
        beside: dict[str, Draw] = {"acceptance_lengths": lambda: figures.acceptance_lengths(rows)}
        if "break_even_acceptance_length" in rows:
            beside["cost_model"] = lambda: figures.cost_model(rows)
        sections.append(Section("Beside one another", [table for table in tables if table.shown.size], beside))
    if finished:
        newest = finished[-1]
        text = f"{newest.folder}: {newest.run.verdict}"
        sections.append(Section("The newest finished run", tables_of_run(newest.run), _of_run(newest), text))
    names = ", ".join(dict.fromkeys(found.run.name for found in runs))
    every = {**definitions(), **(finished[-1].run.definitions if finished else {})}
    main = study_parts or beside_lab or [overview]
    return Report(
        title=names,
        under=described(frame(finished)) if finished else "",
        sections=sections,
        main_tables=main,
        definitions=every,
        newest=finished[-1].run if finished else None,
    )


def sweep_text(runs: Sequence[Found]) -> str:
    """Write what a multirun shows at its end: the tables of the studies among the runs, else of all runs; and how runs
    ended that did not finish."""
    parts = []
    for spec, of_study in studies_in(runs):
        tables = study_tables(spec, of_study)
        parts += ([] if tables[0].title == spec["question"] else [spec["question"]]) + [joined(tables)]
    unfinished = [f"{found.run.status}: {found.folder.name}: {found.run.reason}" for found in runs if found.run.reason]
    overview = [engines_table(runs)] if has_other_engines(runs) else []
    return "\n\n".join([*(parts or [joined(overview or [runs_table(runs)])]), *unfinished])


def _of_run(found: Found) -> dict[str, Draw]:
    rows = frame([found])
    drawings: dict[str, Draw] = {"run_stages": lambda: figures.stage_times(rows)}
    if found.run.num_draft_tokens:
        drawings["run_categories"] = lambda: figures.acceptance_by_category(found)
        drawings["run_positions"] = lambda: figures.acceptance_by_position(rows)
        drawings["run_by_context"] = lambda: figures.acceptance_by_context(rows)
    return drawings
