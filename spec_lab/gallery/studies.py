"""Finds the runs that a notebook is about, and says of them what every picture has to say: where and when they ran."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.errors import UserError
from spec_lab.record.runs import Run, find_runs, run_folders
from spec_lab.report import origin

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_study(folder: str | os.PathLike[str], experiment: str) -> list[Run]:
    """Load the finished runs of `experiment=...` in the folder or below: of several sweeps, those of the newest.

    Raises:
        UserError: there is none.
    """
    runs = [run for run in finished_runs(folder) if run.summary["choices"].get("experiment") == experiment]
    if not runs:
        raise UserError(
            f"{folder}: no finished run of experiment={experiment} in it; "
            f"make them with python -m spec_lab experiment={experiment}"
        )
    newest = runs[-1].folder.parent
    return [run for run in runs if run.folder.parent == newest]


def finished_runs(folder: str | os.PathLike[str]) -> list[Run]:
    """Find the finished runs in the folder or below, the oldest first; none where there is no such folder."""
    if next(run_folders(Path(folder)), None) is None:
        return []
    return [run for run in find_runs([Path(folder)]) if run.summary["status"] == "finished"]


def describe(runs: Sequence[Run]) -> str:
    """Say where and when the runs ran, in a line: machine, type, prompts, version, revision, date."""
    return origin.describe([run.summary for run in runs])


def signed(figure: Figure, runs: Sequence[Run]) -> Figure:
    """Write the same below a figure, with the runs' names."""
    return origin.signed(figure, [run.summary for run in runs])
