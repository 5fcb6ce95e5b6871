"""The plots that a report leaves in its folder. One that cannot be drawn or saved costs no table."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
from spec_lab.report.paired_table import Compared
from spec_lab.report.study import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    return [_save(draw, folder / _numbered(number, name)) for number, name, draw in _drawings(studies, comparisons)]


def knob_plots_of(studies: Sequence[tuple[KnobStudy, list[Run]]], folder: Path) -> list[Plot]:
    """Save the plot of every study of knobs in `folder`, under the name of its experiment."""
    saved: list[Plot] = []
    drawn: Counter[str] = Counter()
    for study, runs in studies:
        numbers = plotted_numbers(study, runs)
        if numbers:
            drawn[study.experiment] += 1
            name = _numbered(drawn[study.experiment], f"{study.experiment}.png")
            saved.append(_save(partial(knob_figure, study, numbers), folder / name))
    return saved


def graph_plots_of(comparisons: Sequence[list[Run]], folder: Path) -> list[Plot]:
    """Save the plot of every comparison of graph modes in `folder`."""
    saved = []
    for number, runs in enumerate(comparisons, start=1):
        words = ("What a graph mode saves", "graph mode", "time of a round over eager's")
        draw = partial(number_over_knob, plotted_times(runs), *words, even=1.0)
        saved.append(_save(draw, folder / _numbered(number, GRAPHS_PLOT)))
    return saved


def run_plots_of(summary: Summary, folder: Path) -> list[Plot]:
    """Save the plots of one finished run in `folder`, which is made: acceptance, where it drafts, and stage times."""
    from spec_lab.report import plots

    folder.mkdir(parents=True, exist_ok=True)
    drafting = [plots.acceptance_by_position, plots.acceptance_by_category] if summary["num_draft_tokens"] else []
    drawings = [*drafting, plots.stage_times]
    return [_save(partial(draw, summary), folder / f"{draw.__name__}.png") for draw in drawings]


def overview_plots_of(overviews: Sequence[tuple[list[Compared], list[Cost]]], folder: Path) -> list[Plot]:
    """Save the plots of runs against one of them, and of their costs, in `folder`: one of each a set of runs."""
    from spec_lab.report import overview_plot

    drawings: list[tuple[int, str, Callable[[], Figure]]] = []
    for number, (compared, costs) in enumerate(overviews, start=1):
        if compared:
            drawings.append((number, LENGTHS_PLOT, partial(overview_plot.lengths_and_differences, compared)))
        if costs:
            drawings.append((number, COST_PLOT, partial(overview_plot.cost_and_speedup, costs)))
    return [_save(draw, folder / _numbered(number, name)) for number, name, draw in drawings]


def _drawings(
    studies: Sequence[list[Point]], comparisons: Sequence[list[Cell]]
) -> Iterator[tuple[int, str, Callable[[], Figure]]]:
    """Yield number, file name, and what draws it. Matplotlib is imported only where there is something to draw."""
    for number, points in enumerate(studies, start=1):
        from spec_lab.report.study_plot import acceptance_against_accuracy

        yield number, STUDY_PLOT, partial(acceptance_against_accuracy, points)
    for number, cells in enumerate(comparisons, start=1):
        from spec_lab.report.drafter_plot import acceptance_against_draft_tokens, predicted_against_measured

        yield number, ACCEPTANCE_PLOT, partial(acceptance_against_draft_tokens, cells)
        if any(cell.predicted_speedup is not None and cell.drafter not in BOUNDS for cell in cells):
            yield number, SPEEDUP_PLOT, partial(predicted_against_measured, cells)


def _numbered(number: int, name: str) -> str:
    return name if number == 1 else f"{number}-{name}"


def _save(draw: Callable[[], Figure], path: Path) -> Plot:
    picture = io.BytesIO()
    try:
        with _plain_text():
            draw().savefig(picture, format="png", dpi=160)
        replace_bytes(path, picture.getvalue())
    except OSError as error:
        return Plot(path, f"plot not saved: {path} ({error.strerror or describe_error(error)})")
    except (ValueError, ArithmeticError) as error:  # what matplotlib raises for figures no axis can show
        return Plot(path, f"plot not drawn: {path} ({describe_error(error)})")
    return Plot(path, None)


@contextmanager
def _plain_text() -> Iterator[None]:
    """Names from outside are no formulas, and a letter without a glyph is not sent to the terminal."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")
        yield
