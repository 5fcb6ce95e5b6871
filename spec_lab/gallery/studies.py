"""Finds the runs for a notebook, and describes where and when they ran, which every picture must say."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.core.errors import UserError
from spec_lab.record.runs import Run, find_runs, run_folders
from spec_lab.report import origin
from spec_lab.report.differing import knob_value, telling_apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A folder that has runs in it or below, or a list of such folders."""


def load_study(folders: Folders, experiment: str) -> list[Run]:
    """Load finished runs. From a list of folders, load all of them. From one folder, load the newest sweep of
    `experiment=...` in it or below; without such a sweep, the newest run and the other runs in its folder.

    Raises:
        UserError: there is no finished run.
    """
    runs = finished_runs(folders)
    if not runs:
        raise UserError(
            f"{named(folders)}: it has no finished run; make them with python -m spec_lab experiment={experiment}"
        )
    if not isinstance(folders, str | os.PathLike):
        return runs
    asked = [run for run in runs if run.summary["choices"].get("experiment") == experiment] or runs
    newest = asked[-1].folder.parent
    return [run for run in asked if run.folder.parent == newest]


def finished_runs(folders: Folders) -> list[Run]:
    """Return the finished runs in a folder or below, or in a list of folders, oldest first; empty if there is no such
    folder."""
    there = [folder for folder in _paths(folders) if next(run_folders(folder), None) is not None]
    return [run for run in find_runs(there) if run.summary["status"] == "finished"] if there else []


def _paths(folders: Folders) -> list[Path]:
    return [Path(folders)] if isinstance(folders, str | os.PathLike) else [Path(folder) for folder in folders]


def named(folders: Folders) -> str:
    """Return the folders as text for an error."""
    return ", ".join(map(str, _paths(folders)))


def told_apart(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return the `names` of runs. If several runs with the same K share a name, all names get the options and knobs in
    which such runs differ."""
    summaries = [run.summary for run in runs]
    groups = sorted({group for summary in summaries for group in summary["choices"]} - {"experiment"})
    found = list(names)
    for group in groups:
        options = [summary["choices"].get(group, "") for summary in summaries]
        alike: dict[tuple[str, int | None], set[str]] = defaultdict(set)
        for name, summary, option in zip(found, summaries, options, strict=True):
            alike[name, summary["num_draft_tokens"]].add(option)
        if any(len(each) > 1 for each in alike.values()):
            found = [", ".join(filter(None, pair)) for pair in zip(found, options, strict=True)]
    knobs = telling_apart(summaries, [(n, s["num_draft_tokens"]) for n, s in zip(found, summaries, strict=True)])
    values = [[f"{knob}={knob_value(summary, knob)}" for knob in knobs] for summary in summaries]
    return [", ".join([name, *more]) for name, more in zip(found, values, strict=True)]


def describe(runs: Sequence[Run]) -> str:
    """Return a line that says where and when the runs ran: machine, dtype, prompts, version, revision, date."""
    return origin.describe([run.summary for run in runs])


def signed(figure: Figure, runs: Sequence[Run]) -> Figure:
    """Write the line of `describe` below a figure, with the runs' names."""
    return origin.signed(figure, [run.summary for run in runs])
