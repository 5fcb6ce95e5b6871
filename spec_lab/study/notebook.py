"""What notebooks begin with: the runs of any folder, and a line in place of what they cannot show."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.record.reading import Found, find_runs

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def newest_study(folders: Folders, experiment: str) -> list[Found]:
    """Return the finished runs to show: of a list of folders all; of one folder the newest sweep of an experiment in it
    or below, else the newest run and those beside it.

    Raises:
        UserError: there is no finished run.
    """
    if not isinstance(folders, (str, os.PathLike)):
        return find_runs(map(Path, folders), finished=True)
    runs = find_runs(Path(folders), finished=True)
    asked = [found for found in runs if found.run.choices.get("experiment") == experiment] or runs
    return [found for found in asked if found.folder.parent == asked[-1].folder.parent]


def shown(make: Callable[[], Any]) -> Any:
    """Return what `make` makes; where the runs lack what it needs, print what that is."""
    try:
        return make()
    except UserError as error:
        print(f"cannot be shown: {error}")
        return None
