"""`python -m spec_lab.report [FOLDER...]`: print the tables of recorded runs, the newest or the named ones.

Of a sweep in which lossy rules have a strict run beside them, also what they cost and bring; of runs that differ in
their drafter alone, also the drafters side by side; of runs that differ in their graph mode, also those. With one
FOLDER, plots of the first two go into it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.record.runs import Run, find_runs
from spec_lab.report.drafter_table import Cell, format_comparison, read_comparisons
from spec_lab.report.graph_table import format_graph_comparison, read_graph_comparisons
from spec_lab.report.run_table import format_definitions, format_run, format_runs
from spec_lab.report.study import Point, format_study, read_studies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY_PLOT = "acceptance_against_accuracy.png"
ACCEPTANCE_PLOT = "acceptance_against_draft_tokens.png"
SPEEDUP_PLOT = "predicted_against_measured.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code, 2 where a folder holds no run."""
    parser = argparse.ArgumentParser(prog="python -m spec_lab.report", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="a run, a sweep, or a folder of them")
    parser.add_argument("--last", type=int, default=10, help="without FOLDER, how many of the newest (default: 10)")
    options = parser.parse_args(arguments)
    try:
        runs = find_runs(options.folders or [Path("outputs")])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    runs = runs if options.folders else runs[-options.last :]
    try:
        studies, comparisons = read_studies(runs), read_comparisons(runs)
        plots = _draw(studies, comparisons, options.folders[0]) if len(options.folders) == 1 else []
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print(_text(runs, studies, comparisons, plots), flush=True)
    except BrokenPipeError:  # a pager or `head` that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _draw(studies: Sequence[list[Point]], comparisons: Sequence[list[Cell]], folder: Path) -> list[Path]:
    """The plots of every study and comparison, in `folder`."""
    paths = []
    for number, points in enumerate(studies, start=1):
        from spec_lab.report.study_plot import acceptance_against_accuracy

        paths.append(_save(acceptance_against_accuracy(points), folder, number, STUDY_PLOT))
    for number, cells in enumerate(comparisons, start=1):
        from spec_lab.report.drafter_plot import BOUNDS, acceptance_against_draft_tokens, predicted_against_measured

        paths.append(_save(acceptance_against_draft_tokens(cells), folder, number, ACCEPTANCE_PLOT))
        if any(cell.predicted_speedup is not None and cell.drafter not in BOUNDS for cell in cells):
            paths.append(_save(predicted_against_measured(cells), folder, number, SPEEDUP_PLOT))
    return paths


def _save(figure: Figure, folder: Path, number: int, name: str) -> Path:
    path = folder / (name if number == 1 else f"{number}-{name}")
    figure.savefig(path, dpi=160)
    return path


def _text(
    runs: Sequence[Run], studies: Sequence[list[Point]], comparisons: Sequence[list[Cell]], plots: Sequence[Path]
) -> str:
    parts = [format_runs(runs)]
    for points in studies:
        parts += ["What lossy acceptance costs and brings", format_study(points)]
    parts += [format_comparison(cells) for cells in comparisons]
    for cells in read_graph_comparisons(runs):
        parts += ["Graph modes", format_graph_comparison(cells)]
    parts += [f"plot: {path}" for path in plots]
    finished = [run for run in runs if run.summary["status"] == "finished"]
    if finished:
        parts += [f"The newest finished run, {finished[-1].folder}", format_run(finished[-1].summary)]
    return "\n\n".join([*parts, format_definitions()])


if __name__ == "__main__":
    raise SystemExit(main())
