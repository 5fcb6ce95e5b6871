"""Reads the records of finished runs. pydantic checks the layout, and says where it is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from spec_lab.core.errors import UserError
from spec_lab.record.models import Model, Request, Round, Run
from spec_lab.record.names import REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE

Row = TypeVar("Row", bound=Model)


class Found(NamedTuple):
    """A recorded run and its folder.

    `run` is as in `summary.json`; `python -m spec_lab.report` prints the definition of every number. Of `requests`,
    `spec_lab.study.frame.requests_frame` makes a frame.
    """

    folder: Path
    run: Run

    def __repr__(self) -> str:
        """Return where it is: a notebook shows what its last line returns, and a record is long."""
        return f"Found({str(self.folder)!r})"

    @property
    def requests(self) -> list[Request]:
        """Read its requests."""
        return read_requests(self.folder)


def read_run(folder: Path | str) -> Run:
    """Read the record of the run in `folder`."""
    return Run.model_validate_json((Path(folder) / SUMMARY_FILE).read_bytes())


def read_requests(folder: Path | str) -> list[Request]:
    """Read the lines of `requests.jsonl`."""
    return list(_read_rows(Path(folder) / REQUESTS_FILE, Request))


def read_rounds(folder: Path | str) -> list[Round]:
    """Read the lines of `rounds.jsonl`."""
    return list(_read_rows(Path(folder) / ROUNDS_FILE, Round))


def find_runs(folders: Path | str | Iterable[Path | str], finished: bool = False) -> list[Found]:
    """Find the runs in the folders and below them, oldest first. Runs that cannot be read are left out with a warning.

    Raises:
        UserError: there is no run.
    """
    places = [Path(folders)] if isinstance(folders, (str, Path)) else [Path(folder) for folder in folders]
    inside = {path.parent.resolve(): path.parent for place in places for path in sorted(place.rglob(SUMMARY_FILE))}
    found = []
    for path, folder in inside.items():
        if not inside.keys().isdisjoint(path.parents):  # a copy of the record for W&B, inside the run's own folder
            continue
        try:
            found.append(Found(folder, read_run(folder)))
        except ValidationError as error:
            warnings.warn(f"left out: {folder}: {error}", stacklevel=2)
    found = [each for each in found if each.run.status == "finished" or not finished]
    if not found:
        named = ", ".join(map(str, places))
        raise UserError(f"{named}: no {'finished ' * finished}run here or below; make one with python -m spec_lab")
    return sorted(found, key=lambda each: each.run.started_at)


def _read_rows(path: Path, model: type[Row]) -> Iterator[Row]:
    """Read the lines of a file. A last line that is incomplete, after a kill, is dropped."""
    *whole, last = path.read_bytes().split(b"\n")
    yield from map(model.model_validate_json, whole)
    with suppress(ValidationError):
        yield model.model_validate_json(last)
