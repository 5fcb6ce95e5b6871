"""`python -m spec_lab.report [FOLDER...]`: the tables of recorded runs, the newest or the named ones.

It also compares the runs, with a table for each comparison that they allow: lossy rules against a lossless run,
drafters (if runs differ only in the drafter), graph modes, and the knobs of the other experiments. For any runs it
compares acceptance lengths and speedups with those of one of them. It also shows the speedup that the cost of a round
predicts. With one FOLDER alone, the plots of its experiments are saved in it.

Runs with different definitions, prompts or versions are shown but not compared, unless --anyway is given. An experiment
that varies its prompts still has all of its runs in one table.

  python -m spec_lab.report outputs/drafters-sweep-1a2b3c4d
  python -m spec_lab.report outputs/RUN outputs/OTHER --base 2 --csv runs.csv --figures figures
  python -m spec_lab.report outputs/drafters-sweep-1a2b3c4d --html drafters.html
  python -m spec_lab.report outputs/drafters-sweep-1a2b3c4d --markdown
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError, describe_os_error, one_line
from spec_lab.record.runs import Run, search_runs
from spec_lab.record.sinks import write_asked
from spec_lab.report.comparable import NumberedRun, comparable_sets, numbered, refusals, sets_of_standards
from spec_lab.report.cost_table import Cost, format_costs, read_costs
from spec_lab.report.drafter_table import Cell, format_comparison, read_comparisons
from spec_lab.report.frame import frame_of
from spec_lab.report.graph_table import format_graph_comparison, read_graph_comparisons
from spec_lab.report.knob_table import KnobStudy, format_knob_study, is_told_by_knobs, read_knob_studies
from spec_lab.report.lossy_table import PricedRules, format_prices, read_prices
from spec_lab.report.markdown_table import format_markdown
from spec_lab.report.paired_table import Compared, compare, format_compared
from spec_lab.report.run_table import format_definitions, format_run, format_runs
from spec_lab.report.saved_plots import (
    Drawing,
    Plot,
    graph_drawings,
    knob_drawings,
    overview_drawings,
    run_drawings,
    saved,
    study_drawings,
)
from spec_lab.report.study import Point, format_study, read_studies

OUTPUTS = Path("outputs")
NEWEST = 10
OTHERS = {
    "markdown": ("html", "csv", "figures", "base"),
    "html": ("csv", "figures"),
}
"""Flags that print something other than the report, each with the flags that it cannot be combined with."""


@dataclass(frozen=True, slots=True)
class Comparisons:
    """All comparisons within one set of runs."""

    studies: list[list[Point]]
    prices: list[PricedRules]
    drafters: list[list[Cell]]
    graphs: list[list[Run]]
    compared: list[Compared]
    costs: list[Cost]
    left_out: list[str]
    unreadable: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code, which is 2 if there is no run to show."""
    return ended(lambda: _report(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m spec_lab.report", description=__doc__, formatter_class=layout)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument("--last", type=int, help=f"without FOLDER, how many of the newest (default: {NEWEST})")
    parser.add_argument("--base", type=int, metavar="NUMBER", help="the run that others are compared with (default: 1)")
    parser.add_argument(
        "--anyway", action="store_true", help=("compare runs with different definitions, prompts or versions")
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all runs and their references as one table")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="save all figures there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page to send: tables, figures, commands")
    parser.add_argument("--markdown", action="store_true", help="print one table for a document, and nothing else")
    options = parser.parse_args(arguments)
    if options.last is not None and options.last < 1:
        raise UserError(f"--last={options.last} shows no run; use --last=1 or more")
    if options.last is not None and options.folders:
        raise UserError(f"--last={options.last} is for the newest of {OUTPUTS}; leave it out, or the folders")
    _refuse_other_prints(options)
    return options


def _refuse_other_prints(options: argparse.Namespace) -> None:
    """Raise UserError if a given flag would be ignored because of another one."""
    given = [name for name, value in vars(options).items() if value not in (None, False)]
    for flag, others in OTHERS.items():
        left_out = [name for name in others if name in given]
        if flag in given and left_out:
            raise UserError(f"--{flag} prints only its own output; leave out --{left_out[0]}, or use two calls")


def _report(options: argparse.Namespace) -> int:
    runs, unreadable = search_runs(options.folders or [OUTPUTS])
    _say(f"left out: {reason}" for reason in unreadable)
    if not runs:
        return 2
    runs = runs if options.folders else runs[-(options.last or NEWEST) :]
    if options.base is not None and not 1 <= options.base <= len(runs):
        raise UserError(f"--base={options.base}: the runs are 1 to {len(runs)}; name one of them")
    if options.markdown:
        print(_markdown(runs, options.anyway))
        return 0
    all_runs = numbered(runs)
    sets = [all_runs] if options.anyway else comparable_sets(all_runs)
    found = [_compare(part, options.base) for part in sets]
    knobs = [runs] if options.anyway else [[run.run for run in part] for part in sets_of_standards(all_runs)]
    studies = [study for part in knobs for study in read_knob_studies(part)]
    if options.html is not None:
        _say([*refusals(sets), *_left_out(found)])
        _write_html(runs, found, studies, [*unreadable, *refusals(sets), *_left_out(found)], options.html)
        print(options.html)
        return 0
    plots = _plots(found, studies, options)
    _say([*refusals(sets), *_left_out(found)])
    _say(plot.problem for plot in plots if plot.problem is not None)
    written = _write_csv(runs, options.csv) if options.csv is not None else []
    print(_text(runs, found, studies, plots, written))
    is_missing = options.figures is not None and any(plot.problem is not None for plot in plots)
    return 1 if is_missing else 0


def _markdown(runs: Sequence[Run], anyway: bool) -> str:
    """Return one table of the finished runs. Unless `anyway` is true they must be comparable, since a reader of the
    document could not see which are not.

    Raises:
        UserError: some of the runs are not comparable, none has finished, or the requests of one cannot be read.
    """
    finished = [run for run in numbered(runs) if run.run.summary["status"] == "finished"]
    apart = [] if anyway else refusals(comparable_sets(finished))
    if apart:
        raise UserError(f"--markdown puts all runs into one table: {'; '.join(apart)}")
    return format_markdown([run.run for run in finished])


def _compare(runs: Sequence[NumberedRun], base: int | None) -> Comparisons:
    plain = [run.run for run in runs]
    studies, left_out = read_studies(plain)
    compared, not_compared = compare(runs, base)
    return Comparisons(
        studies,
        read_prices(plain),
        [cells for cells in read_comparisons(plain) if not is_told_by_knobs([cell.summary for cell in cells])],
        read_graph_comparisons(plain),
        compared,
        read_costs(runs),
        left_out,
        not_compared,
    )


def _left_out(found: Sequence[Comparisons]) -> list[str]:
    """Return a line for each run that a study of lossy rules, or the comparison with one run, had to leave out."""
    said = list(dict.fromkeys(reason for part in found for reason in part.left_out))
    others = dict.fromkeys(reason for part in found for reason in part.unreadable)
    return [*said, *(f"not compared: {reason}" for reason in others if not any(reason in line for line in said))]


def _plots(
    found: Sequence[Comparisons], knobs: Sequence[tuple[KnobStudy, list[Run]]], options: argparse.Namespace
) -> list[Plot]:
    """Return the plots that were saved: all of them with `--figures`, else those of experiments, if there is one
    folder."""
    if options.figures is None:
        return _experiment_plots(found, knobs, options.folders[0]) if len(options.folders) == 1 else []
    try:
        options.figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--figures={options.figures} cannot be made ({describe_os_error(error)}); name another one"
        ) from error
    return saved(_all_drawings(found, knobs), options.figures)


def _all_drawings(found: Sequence[Comparisons], knobs: Sequence[tuple[KnobStudy, list[Run]]]) -> Iterator[Drawing]:
    yield from _experiment_drawings(found, knobs)
    yield from overview_drawings([(part.compared, part.costs) for part in found])


def _experiment_plots(
    found: Sequence[Comparisons], knobs: Sequence[tuple[KnobStudy, list[Run]]], folder: Path
) -> list[Plot]:
    return saved(_experiment_drawings(found, knobs), folder)


def _experiment_drawings(
    found: Sequence[Comparisons], knobs: Sequence[tuple[KnobStudy, list[Run]]]
) -> Iterator[Drawing]:
    yield from study_drawings(
        [points for part in found for points in part.studies], [cells for part in found for cells in part.drafters]
    )
    yield from knob_drawings(knobs)
    yield from graph_drawings([runs for part in found for runs in part.graphs])


def _write_html(
    runs: Sequence[Run],
    found: Sequence[Comparisons],
    knobs: Sequence[tuple[KnobStudy, list[Run]]],
    remarks: Sequence[str],
    path: Path,
) -> None:
    from spec_lab.report.html_report import html_report

    finished = [run.summary for run in runs if run.summary["status"] == "finished"]
    drawings = [*_all_drawings(found, knobs), *(run_drawings(finished[-1]) if finished else ())]
    page = html_report(runs, [part.compared for part in found], [part.costs for part in found], drawings, remarks)
    write_asked("--html", path, page)


def _write_csv(runs: Sequence[Run], path: Path) -> list[str]:
    write_asked("--csv", path, frame_of(runs).to_csv(index=False))
    return [f"table: {path}"]


def _text(
    runs: Sequence[Run],
    found: Sequence[Comparisons],
    knobs: Sequence[tuple[KnobStudy, list[Run]]],
    plots: Sequence[Plot],
    written: Sequence[str],
) -> str:
    parts = [format_runs(runs)]
    parts += [format_knob_study(study, part) for study, part in knobs]
    for each in found:
        parts += _comparisons_text(each)
    parts += [*(one_line(f"plot: {plot.path}") for plot in plots if plot.problem is None), *written]
    finished = [run for run in runs if run.summary["status"] == "finished"]
    if finished:
        parts += [one_line(f"The newest finished run, {finished[-1].folder}"), format_run(finished[-1].summary)]
    return "\n\n".join([*parts, format_definitions()])


def _comparisons_text(found: Comparisons) -> list[str]:
    parts: list[str] = []
    parts += [format_study(points) for points in found.studies]
    parts += [format_prices(prices) for prices in found.prices]
    parts += [format_comparison(cells) for cells in found.drafters]
    for runs in found.graphs:
        parts += ["Graph modes", format_graph_comparison(runs)]
    parts += [format_compared(found.compared)] if found.compared else []
    parts += [format_costs(found.costs)] if found.costs else []
    return parts


def _say(reasons: Iterable[str]) -> None:
    for reason in reasons:
        print(one_line(reason), file=sys.stderr)


if __name__ == "__main__":
    leave(main)
