"""The contents of an HTML report: tables, figures, commands, machine and definitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spec_lab.core.errors import describe_error
from spec_lab.record.definitions import DEFINITIONS
from spec_lab.record.runs import Run
from spec_lab.record.schema import Speed, Summary
from spec_lab.record.wording import ABSENT, number, percent
from spec_lab.report import html_page
from spec_lab.report.command import command_of
from spec_lab.report.cost_table import NOTE as COST_NOTE
from spec_lab.report.cost_table import TITLE as COST_TITLE
from spec_lab.report.cost_table import Cost, cost_cells
from spec_lab.report.differing import distinct_words
from spec_lab.report.figure_data import figure_data
from spec_lab.report.html_page import Part
from spec_lab.report.origin import describe
from spec_lab.report.paired_table import NOTE as PAIRED_NOTE
from spec_lab.report.paired_table import Compared, compared_cells
from spec_lab.report.run_table import IMPOSED, mixes, run_cells, stage_cells
from spec_lab.report.saved_plots import Drawing, as_svg

TEXTS = ("#", "drafter", "prune", "rule", "status", "folder", "run", "category", "kernel", "panel", "series", "")


def html_report(
    runs: Sequence[Run],
    compared: Sequence[Sequence[Compared]],
    costs: Sequence[Sequence[Cost]],
    drawings: Iterable[Drawing],
    remarks: Sequence[str],
) -> str:
    """Return the page of some runs, numbered as `format_runs` numbers them.

    Args:
        compared: for each set of runs, the comparisons with one of them.
        costs: for each set, the cost model.
        drawings: the figures of the page.
        remarks: what was left out, and why.
    """
    summaries = [run.summary for run in runs]
    finished = [summary for summary in summaries if summary["status"] == "finished"]
    names = dict.fromkeys(summary["name"] for summary in summaries)
    parts = [
        Part("Runs", _runs(runs, remarks)),
        *_tables("Against one of them", PAIRED_NOTE, (compared_cells(part) for part in compared if part)),
        *_tables(COST_TITLE, COST_NOTE, (cost_cells(part) for part in costs if part)),
        *_figures(drawings),
        *_details(summaries),
        Part("Commands", _commands(runs)),
        Part("Machine", _machine(summaries)),
        Part("Definitions", html_page.definitions(list(DEFINITIONS.items()))),
    ]
    return html_page.page_of(", ".join(names), describe(finished) if finished else "no finished run", parts)


def _runs(runs: Sequence[Run], remarks: Sequence[str]) -> str:
    header, body = run_cells(runs)
    said = [f"#{i} {r.summary['status']}: {r.summary['reason']}" for i, r in enumerate(runs, 1) if r.summary["reason"]]
    imposed = [IMPOSED] if any(run.summary["acceptance_imposed"] for run in runs) else []
    notes = [*imposed, *mixes(runs), *said, *remarks]
    return html_page.table(header, body, _texts(header)) + "".join(map(html_page.note, notes))


def _tables(title: str, explained: str, cells: Iterable[tuple[list[str], list[list[str]]]]) -> Iterator[Part]:
    tables = [html_page.table(header, body, _texts(header)) for header, body in cells]
    if tables:
        yield Part(title, "".join(tables) + html_page.note(explained))


def _figures(drawings: Iterable[Drawing]) -> Iterator[Part]:
    figures = [_figure(drawing) for drawing in drawings]
    if figures:
        yield Part("Figures", "\n".join(figures))


def _figure(drawing: Drawing) -> str:
    try:
        figure, svg = as_svg(drawing)
    except (ValueError, ArithmeticError) as error:
        return html_page.note(f"{drawing.name} could not be drawn: {describe_error(error)}")
    header, body = figure_data(figure)
    data = html_page.folded(f"data of {drawing.name.removesuffix('.png')}", html_page.table(header, body, TEXTS))
    return f"<figure>{svg}{data}</figure>"


def _details(summaries: Sequence[Summary]) -> Iterator[Part]:
    """Yield stage times, acceptance rates by position and category, and the kernels of profiled runs."""
    finished = {
        f"#{place} {words}": summary
        for place, (words, summary) in enumerate(zip(distinct_words(summaries), summaries, strict=True), start=1)
        if summary["status"] == "finished"
    }
    if not finished:
        return
    speeds: dict[str, Speed] = {**finished}
    header, body = stage_cells(speeds)
    yield Part("Stage times", html_page.table(["run", *header[1:]], body, TEXTS))
    yield Part("Acceptance by position", _positions(finished))
    yield Part("Acceptance by category", _categories(finished))
    kernels = [
        [name, kernel["name"], number(kernel["calls_per_round"]), number(kernel["us_per_round"])]
        for name, summary in finished.items()
        for kernel in summary["kernels"]
    ]
    if kernels:
        kernel_table = html_page.table(["run", "kernel", "calls a round", "us a round"], kernels, TEXTS)
        yield Part("Kernels", html_page.folded(f"{len(kernels)} kernels of the profiled rounds", kernel_table))


def _positions(finished: dict[str, Summary]) -> str:
    rows = []
    for name, summary in finished.items():
        rates = summary["acceptance_rate_by_position"]
        each = zip(rates["conditional"], rates["unconditional"], rates["reached"], strict=True)
        for place, (conditional, joint, reached) in enumerate(each, start=1):
            rows.append([name, str(place), percent(conditional), percent(joint), str(reached)])
    return html_page.table(["run", "position", "conditional", "joint", "reached"], rows, TEXTS)


def _categories(finished: dict[str, Summary]) -> str:
    rows = []
    for name, summary in finished.items():
        for category, outcome in summary["by_category"].items():
            length, right = number(outcome["acceptance_length"]), percent(outcome["accuracy"]["value"])
            rows.append([name, category, str(outcome["num_requests"]), length, right])
    return html_page.table(["run", "category", "requests", "acceptance length", "right answers"], rows, TEXTS)


def _commands(runs: Sequence[Run]) -> str:
    lines = list(map(command_of, runs))
    return html_page.code("\n".join(f"{line}  # {place}" for place, line in enumerate(lines, start=1)))


def _machine(summaries: Sequence[Summary]) -> str:
    """Return a table of the machines and versions, with a line for all runs that agree in them."""
    keys = ("device_name", "cpu_model", "device", "dtype", "num_threads", "world_size", "git_revision", "template")
    packages = list(dict.fromkeys(name for summary in summaries for name in summary["versions"]))
    rows: dict[tuple[str, ...], list[str]] = {}
    for place, summary in enumerate(summaries, start=1):
        values = [_shown(summary.get(key)) for key in keys]
        values += [_shown(summary["versions"].get(package)) for package in packages]
        rows.setdefault(tuple(values), []).append(f"#{place}")
    body = [[" ".join(places), *values] for values, places in rows.items()]
    return html_page.table(["run", *keys, *packages], body, TEXTS)


def _shown(value: object) -> str:
    return ABSENT if value is None else str(value)


def _texts(header: Sequence[str]) -> list[str]:
    """Return the columns that hold text: the known ones, and those with a dot in their names, which are knobs."""
    return [name for name in header if name in TEXTS or "." in name]
