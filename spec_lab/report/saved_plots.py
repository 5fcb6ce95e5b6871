"""The plots that a report saves. If one cannot be drawn or saved, the rest of the report is unaffected."""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_lab.core.errors import describe_error
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

STUDY_PLOT = "acceptance_against_accuracy.png"
ACCEPTANCE_PLOT = "acceptance_against_draft_tokens.png"
SPEEDUP_PLOT = "predicted_against_measured.png"
LENGTHS_PLOT = "acceptance_lengths.png"
COST_PLOT = "cost_model.png"
GRAPHS_PLOT = "graph_modes.png"

SVG_DPI = 72
"""Resolution of matplotlib's SVG output; a layout at another resolution would misplace legends."""


class Plot(NamedTuple):
    """A plot's file, or the reason why there is none."""

    path: Path
    problem: str | None


class Drawing(NamedTuple):
    """A figure that is not drawn yet: its file name, the function that draws it, and the runs it shows. Matplotlib is
    imported only when it is drawn."""

    name: str
    draw: Callable[[], Figure]
    of: list[Summary]


def saved(drawings: Iterable[Drawing], folder: Path) -> list[Plot]:
    """Draw and save each as PNG in `folder`."""
    return [_save(drawing.draw, folder / drawing.name, drawing.of) for drawing in drawings]


def as_svg(drawing: Drawing) -> tuple[Figure, str]:
    """Draw one, and return it with SVG that can be put into an HTML page: texts stay texts, and there is no XML
    declaration.

    Raises:
        ValueError, ArithmeticError: as matplotlib does for values that no axis can show.
    """
    picture = io.StringIO()
    with _plain_text({"svg.fonttype": "none", "svg.hashsalt": drawing.name}):
        figure = signed(drawing.draw(), drawing.of)
        figure.set_dpi(SVG_DPI)
        figure.savefig(picture, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = picture.getvalue()
    return figure, re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def knob_drawings(studies: Sequence[tuple[KnobStudy, list[Run]]]) -> Iterator[Drawing]:
    """Yield the plot of each study of knobs that has a number to draw, named after its experiment."""
    drawn: Counter[str] = Counter()
    for study, runs in studies:
        numbers = plotted_numbers(study, runs)
        if numbers:
            drawn[study.experiment] += 1
            name = _numbered(drawn[study.experiment], f"{study.experiment}.png")
            yield Drawing(name, partial(knob_figure, study, numbers), _summaries(runs))


def graph_drawings(comparisons: Sequence[list[Run]]) -> Iterator[Drawing]:
    """Yield the plot of each comparison of graph modes in which several modes have a time."""
    number = 0
    for runs in comparisons:
        numbers = plotted_times(runs)
        if len({each.place for each in numbers}) > 1:
            number += 1
            draw = partial(
                number_over_knob,
                numbers,
                "What a graph mode saves",
                "graph mode",
                "time of a round over eager's",
                even=1.0,
            )
            yield Drawing(_numbered(number, GRAPHS_PLOT), draw, _summaries(runs))


def run_drawings(summary: Summary) -> Iterator[Drawing]:
    """Yield the plots of one finished run: acceptance if it drafts, and stage times."""
    from spec_lab.report import plots

    drafting = [plots.acceptance_by_position, plots.acceptance_by_category] if summary["num_draft_tokens"] else []
    for draw in [*drafting, plots.stage_times]:
        yield Drawing(f"{draw.__name__}.png", partial(draw, summary), [summary])


def run_plots_of(summary: Summary, folder: Path) -> list[Plot]:
    """Make `folder`, and save the plots of one finished run in it."""
    folder.mkdir(parents=True, exist_ok=True)
    return saved(run_drawings(summary), folder)


def overview_drawings(overviews: Sequence[tuple[list[Compared], list[Cost]]]) -> Iterator[Drawing]:
    """Yield, for each set of runs, the plot that compares them with one of them and the plot of their costs."""
    from spec_lab.report import overview_plot

    for number, (compared, costs) in enumerate(overviews, start=1):
        if compared:
            draw = partial(overview_plot.lengths_and_differences, compared)
            yield Drawing(_numbered(number, LENGTHS_PLOT), draw, _summaries(row.run.run for row in compared))
        if costs:
            draw = partial(overview_plot.cost_and_speedup, costs)
            yield Drawing(_numbered(number, COST_PLOT), draw, _summaries(cost.run.run for cost in costs))


def study_drawings(studies: Sequence[list[Point]], comparisons: Sequence[list[Cell]]) -> Iterator[Drawing]:
    """Yield the plots of every study of lossy rules and of every comparison of drafters."""
    for number, points in enumerate(studies, start=1):
        from spec_lab.report.study_plot import acceptance_against_accuracy

        draw = partial(acceptance_against_accuracy, points)
        yield Drawing(_numbered(number, STUDY_PLOT), draw, [point.summary for point in points])
    for number, cells in enumerate(comparisons, start=1):
        from spec_lab.report.drafter_plot import acceptance_against_draft_tokens, predicted_against_measured

        of = [cell.summary for cell in cells if cell.is_finished]
        yield Drawing(_numbered(number, ACCEPTANCE_PLOT), partial(acceptance_against_draft_tokens, cells), of)
        if any(cell.predicted_speedup is not None and cell.drafter not in BOUNDS for cell in cells):
            yield Drawing(_numbered(number, SPEEDUP_PLOT), partial(predicted_against_measured, cells), of)


def _numbered(number: int, name: str) -> str:
    return name if number == 1 else f"{number}-{name}"


def _summaries(runs: Iterable[Run]) -> list[Summary]:
    return [run.summary for run in runs]


def _save(draw: Callable[[], Figure], path: Path, of: Sequence[Summary]) -> Plot:
    picture = io.BytesIO()
    try:
        with _plain_text():
            signed(draw(), of).savefig(picture, format="png", dpi=160, bbox_inches="tight")
        replace_bytes(path, picture.getvalue())
    except OSError as error:
        return Plot(path, f"plot not saved: {path} ({error.strerror or describe_error(error)})")
    except (ValueError, ArithmeticError) as error:  # matplotlib raises these for values that no axis can show
        return Plot(path, f"plot not drawn: {path} ({describe_error(error)})")
    return Plot(path, None)


@contextmanager
def _plain_text(more: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Draw `$` in names as it is rather than as a formula, and print no warning for letters without a glyph."""
    from matplotlib import rc_context

    settings: dict[Any, Any] = {"text.parse_math": False, **more}
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")
        yield
