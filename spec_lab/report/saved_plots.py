"""The plots that a report leaves in its folder. One that cannot be drawn or saved costs no table."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from spec_lab.errors import describe_error
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.sinks import replace_bytes
from spec_lab.report.cost_table import Cost
from spec_lab.report.drafter_table import Cell
from spec_lab.report.graph_table import plotted_times
from spec_lab.report.knob_plot import knob_figure, plotted_numbers
from spec_lab.report.knob_table import KnobStudy
from spec_lab.report.known_options import BOUNDS
from spec_lab.report.lines_plot import number_over_knob
from spec_lab.report.origin import signed
from spec_lab.report.paired_table import Compared
from spec_lab.report.study import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Drawing: TypeAlias = tuple[int, str, Callable[[], Figure], list[Summary]]

STUDY_PLOT = "acceptance_against_accuracy.png"
ACCEPTANCE_PLOT = "acceptance_against_draft_tokens.png"
SPEEDUP_PLOT = "predicted_against_measured.png"
LENGTHS_PLOT = "acceptance_lengths.png"
COST_PLOT = "cost_model.png"
GRAPHS_PLOT = "graph_modes.png"


class Plot(NamedTuple):
    """A file, or why there is none."""

    path: Path
    problem: str | None


def plots_of(studies: Sequence[list[Point]], comparisons: Sequence[list[Cell]], folder: Path) -> list[Plot]:
    """Save the plots of every study and comparison in `folder`."""
    drawings = _drawings(studies, comparisons)
    return [_save(draw, folder / _numbered(number, name), of) for number, name, draw, of in drawings]


def knob_plots_of(studies: Sequence[tuple[KnobStudy, list[Run]]], folder: Path) -> list[Plot]:
    """Save the plot of every study of knobs in `folder`, under the name of its experiment."""
    saved: list[Plot] = []
    drawn: Counter[str] = Counter()
    for study, runs in studies:
        numbers = plotted_numbers(study, runs)
        if numbers:
            drawn[study.experiment] += 1
            name = _numbered(drawn[study.experiment], f"{study.experiment}.png")
            saved.append(_save(partial(knob_figure, study, numbers), folder / name, _summaries(runs)))
    return saved


def graph_plots_of(comparisons: Sequence[list[Run]], folder: Path) -> list[Plot]:
    """Save the plot of every comparison of graph modes in `folder`."""
    saved: list[Plot] = []
    words = ("What a graph mode saves", "graph mode", "time of a round over eager's")
    for runs in comparisons:
        numbers = plotted_times(runs)
        if len({each.place for each in numbers}) > 1:
            path = folder / _numbered(len(saved) + 1, GRAPHS_PLOT)
            saved.append(_save(partial(number_over_knob, numbers, *words, even=1.0), path, _summaries(runs)))
    return saved


def run_plots_of(summary: Summary, folder: Path) -> list[Plot]:
    """Save the plots of one finished run in `folder`, which is made: acceptance, where it drafts, and stage times."""
    from spec_lab.report import plots

    folder.mkdir(parents=True, exist_ok=True)
    drafting = [plots.acceptance_by_position, plots.acceptance_by_category] if summary["num_draft_tokens"] else []
    drawings = [*drafting, plots.stage_times]
    return [_save(partial(draw, summary), folder / f"{draw.__name__}.png", [summary]) for draw in drawings]


def overview_plots_of(overviews: Sequence[tuple[list[Compared], list[Cost]]], folder: Path) -> list[Plot]:
    """Save the plots of runs against one of them, and of their costs, in `folder`: one of each a set of runs."""
    from spec_lab.report import overview_plot

    drawings: list[Drawing] = []
    for number, (compared, costs) in enumerate(overviews, start=1):
        if compared:
            draw = partial(overview_plot.lengths_and_differences, compared)
            drawings.append((number, LENGTHS_PLOT, draw, _summaries(row.run.run for row in compared)))
        if costs:
            draw = partial(overview_plot.cost_and_speedup, costs)
            drawings.append((number, COST_PLOT, draw, _summaries(cost.run.run for cost in costs)))
    return [_save(draw, folder / _numbered(number, name), of) for number, name, draw, of in drawings]


def _drawings(studies: Sequence[list[Point]], comparisons: Sequence[list[Cell]]) -> Iterator[Drawing]:
    """Yield number, file name, what draws it, what it is of. Matplotlib is imported only where something is drawn."""
    for number, points in enumerate(studies, start=1):
        from spec_lab.report.study_plot import acceptance_against_accuracy

        yield number, STUDY_PLOT, partial(acceptance_against_accuracy, points), [point.summary for point in points]
    for number, cells in enumerate(comparisons, start=1):
        from spec_lab.report.drafter_plot import acceptance_against_draft_tokens, predicted_against_measured

        of = [cell.summary for cell in cells if cell.is_finished]
        yield number, ACCEPTANCE_PLOT, partial(acceptance_against_draft_tokens, cells), of
        if any(cell.predicted_speedup is not None and cell.drafter not in BOUNDS for cell in cells):
            yield number, SPEEDUP_PLOT, partial(predicted_against_measured, cells), of


def _numbered(number: int, name: str) -> str:
    return name if number == 1 else f"{number}-{name}"


def _summaries(runs: Iterable[Run]) -> list[Summary]:
    return [run.summary for run in runs]


def _save(draw: Callable[[], Figure], path: Path, of: Sequence[Summary]) -> Plot:
    picture = io.BytesIO()
    try:
        signed(draw(), of).savefig(picture, format="png", dpi=160, bbox_inches="tight")
        replace_bytes(path, picture.getvalue())
    except OSError as error:
        return Plot(path, f"plot not saved: {path} ({error.strerror or describe_error(error)})")
    except (ValueError, ArithmeticError) as error:  # what matplotlib raises for figures no axis can show
        return Plot(path, f"plot not drawn: {path} ({describe_error(error)})")
    return Plot(path, None)
