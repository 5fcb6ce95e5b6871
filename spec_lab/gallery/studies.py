"""Finds the runs that a notebook is about, and says of them what every picture has to say: where and when they ran."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from spec_lab.errors import UserError
from spec_lab.record.runs import Run, find_runs, run_folders

SHORT_REVISION = 7


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
    newest = runs[-1].summary
    machines = ", ".join(dict.fromkeys(f"{run.summary['device_name']}" for run in runs))
    prompts = sorted({run.summary["num_requests"] for run in runs})
    revision = (newest["git_revision"] or "unknown")[:SHORT_REVISION]
    parts = [
        f"{_count(len(runs), 'run')} on {machines}",
        _count(newest["num_threads"], "thread") if newest["device"] == "cpu" else "",
        f"{newest['dtype']}",
        f"{' or '.join(map(str, prompts))} prompts",
        f"torch {newest['versions'].get('torch')}",
        f"revision {revision}",
        newest["started_at"][:10],
    ]
    return ", ".join(part for part in parts if part)


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
