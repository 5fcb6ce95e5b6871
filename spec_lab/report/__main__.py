"""`python -m spec_lab.report [FOLDER...]`: print the tables of recorded runs, the newest or the named ones.

Of a sweep in which lossy rules have a strict run beside them, also what they cost and bring; of runs that differ in
their drafter alone, also the drafters side by side; of runs that differ in their graph mode, also those; of the other
experiments, what their knobs do. With one
FOLDER, plots of the first two go into it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from spec_lab.cli.arguments import LineParser
from spec_lab.cli.ending import EXIT_CODES, guarded
from spec_lab.errors import UserError, one_line
from spec_lab.record.runs import Run, search_runs
from spec_lab.report.drafter_table import Cell, format_comparison, read_comparisons
from spec_lab.report.graph_table import format_graph_comparison, read_graph_comparisons
from spec_lab.report.knob_table import format_knob_study, read_knob_studies
from spec_lab.report.run_table import format_definitions, format_run, format_runs
from spec_lab.report.saved_plots import Plot, plots_of
from spec_lab.report.study import Point, format_study, read_studies

OUTPUTS = Path("outputs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code, 2 where there is no run to show."""
    return guarded(lambda: _report(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = LineParser(prog="python -m spec_lab.report", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument("--last", type=int, default=10, help="without FOLDER, how many of the newest (default: 10)")
    options = parser.parse_args(arguments)
    if options.last < 1:
        raise UserError(f"--last={options.last} shows no run; use --last=1 or more")
    return options


def _report(options: argparse.Namespace) -> int:
    runs, unreadable = search_runs(options.folders or [OUTPUTS])
    _say(f"left out: {reason}" for reason in unreadable)
    if not runs:
        return EXIT_CODES["refused"]
    runs = runs if options.folders else runs[-options.last :]
    studies, left_out = read_studies(runs)
    comparisons = read_comparisons(runs)
    plots = plots_of(studies, comparisons, options.folders[0]) if len(options.folders) == 1 else []
    _say([*left_out, *(plot.problem for plot in plots if plot.problem is not None)])
    print(_text(runs, studies, comparisons, plots))
    return EXIT_CODES["finished"]


def _text(
    runs: Sequence[Run], studies: Sequence[list[Point]], comparisons: Sequence[list[Cell]], plots: Sequence[Plot]
) -> str:
    parts = [format_runs(runs)]
    for points in studies:
        parts += ["What lossy acceptance costs and brings", format_study(points)]
    parts += [format_comparison(cells) for cells in comparisons]
    for cells in read_graph_comparisons(runs):
        parts += ["Graph modes", format_graph_comparison(cells)]
    parts += [format_knob_study(study, found) for study, found in read_knob_studies(runs)]
    parts += [f"plot: {plot.path}" for plot in plots if plot.problem is None]
    finished = [run for run in runs if run.summary["status"] == "finished"]
    if finished:
        parts += [f"The newest finished run, {finished[-1].folder}", format_run(finished[-1].summary)]
    return "\n\n".join([*parts, format_definitions()])


def _say(reasons: Iterable[str]) -> None:
    for reason in reasons:
        print(one_line(reason), file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
