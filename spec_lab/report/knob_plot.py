"""The figure of a study of knobs (`report.knob_table`): the number that the study draws, against one of its knobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_lab.record.runs import Run
from spec_lab.record.wording import ABSENT
from spec_lab.report.knob_table import KnobStudy, shown_key, shown_keys
from spec_lab.report.lines_plot import PlottedNumber, ends_of, number_over_knob

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plotted_numbers(study: KnobStudy, runs: Sequence[Run]) -> list[PlottedNumber]:
    """Return the number that the study shows, for each run that has one. A line's name has the keys in which runs
    differ, except the key of the x axis."""
    keys = shown_keys(study, runs)
    shown = [{name: shown_key(study, run.summary, name, key) for name, key in keys.items()} for run in runs]
    varied = [name for name in keys if name != study.drawn.knob and len({cells[name] for cells in shown}) > 1]
    found = []
    for run, cells in zip(runs, shown, strict=True):
        number = study.drawn.number(run.summary)
        if number is not None:
            line = ", ".join(f"{name} {cells[name]}" for name in varied if cells[name] != ABSENT)
            found.append(PlottedNumber(cells[study.drawn.knob], line, *ends_of(number)))
    return found


def knob_figure(study: KnobStudy, numbers: Sequence[PlottedNumber]) -> Figure:
    """Draw the numbers of a study."""
    title, _, _ = study.question.partition(":")
    return number_over_knob(numbers, title, study.drawn.knob, study.drawn.quantity, study.drawn.even)
