"""Reads the records of finished runs. pydantic checks the layout, and says where it is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from spec_lab.core.errors import UserError
from spec_lab.record.models import Model, Request, Round, Run
from spec_lab.record.names import REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE

Row = TypeVar("Row", bound=Model)


class Found(NamedTuple):
    """A recorded run and its folder."""

    folder: Path
    run: Run

    def requests(self) -> list[Request]:
        """Read its requests."""
        return read_requests(self.folder)


def read_run(folder: Path | str) -> Run:
    """Read the record of the run in `folder`.

    Raises:
        UserError: there is none, or it is broken or of another version.
    """
    path = Path(folder) / SUMMARY_FILE
    try:
        return Run.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path}: {error.strerror}; name the folder of a run; a run prints it at its end") from error
    except ValidationError as error:
        raise UserError(f"{path}: {_described(error)}; run again with this spec_lab") from error


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
        except UserError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    found = [each for each in found if each.run.status == "finished" or not finished]
    if not found:
        named = ", ".join(map(str, places))
        raise UserError(f"{named}: no {'finished ' * finished}run here or below; make one with python -m spec_lab")
    return sorted(found, key=lambda each: each.run.started_at)


def _read_rows(path: Path, model: type[Row]) -> Iterator[Row]:
    """Read the lines of a file. A last line that is incomplete, after a kill, is dropped."""
    if not path.exists():
        raise UserError(f"{path}: missing; a run that never began has none")
    *whole, torn = path.read_bytes().split(b"\n")
    for number, line in enumerate([*whole, *([torn] if torn.endswith(b"}") else [])], start=1):
        try:
            yield model.model_validate_json(line)
        except ValidationError as error:
            if line is torn:
                return
            raise UserError(f"{path}, line {number}: {_described(error)}") from error


def _described(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
