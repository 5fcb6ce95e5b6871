"""Follows a running sweep, and writes a paragraph for each job as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from spec_lab.core.errors import UserError, one_line
from spec_lab.program.table import paragraph
from spec_lab.record.reading import read_summary
from spec_lab.record.recorder import NOT_ENDED
from spec_lab.record.runs import Run, run_folders
from spec_lab.record.sinks import SUMMARY_FILE, SWEEP_FILE

SECONDS_BETWEEN_LOOKS = 0.5


def follow(folder: Path, was_left: Callable[[Path], bool], seconds: float = SECONDS_BETWEEN_LOOKS) -> Iterator[Run]:
    """Yield the runs of a sweep, or of any folder of runs, as they end, beginning with those that already have.

    It ends with the sweep, or with the run if the folder is that of one run. For another folder it does not end.

    Args:
        was_left: returns whether a folder's sweep was killed or interrupted, so that no more runs will end in it.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folder of a sweep, which a sweep prints when it begins")
    ended: set[Path] = set()
    while True:
        # Checked before looking for runs, so that a run that ends in between is not missed.
        is_closed = (folder / SWEEP_FILE).exists() or was_left(folder)
        for run in list(_newly_ended(folder, ended)):
            ended.add(run.folder)
            yield run
        if is_closed or ((folder / SUMMARY_FILE).exists() and folder in ended):
            return
        time.sleep(seconds)


def format_ended(run: Run, number: int) -> str:
    """Say how a job ended, its results, and where its folder is."""
    summary = run.summary
    lines = [f"[{number}] {summary['status']}: {summary['name']}, {', '.join(_labels(run))}", summary["verdict"]]
    filled = [paragraph(line, indent="    ") for line in lines]
    return "\n    ".join([*filled, one_line(run.folder)])


def _labels(run: Run) -> list[str]:
    return [f"{group}={choice}" for group, choice in run.summary["choices"].items()]


def _newly_ended(folder: Path, known: set[Path]) -> Iterator[Run]:
    for path in run_folders(folder):
        if path in known:
            continue
        try:
            summary = read_summary(path)
        except UserError:
            continue  # a later look may find it complete
        if summary["reason"] not in NOT_ENDED:
            yield Run(path, summary)
