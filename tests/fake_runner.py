"""A stand-in for the runner, for tests of the command line around it: nothing is loaded or decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_lab.__main__ import main
from spec_lab.config.run import Run
from spec_lab.record import models
from spec_lab.record.names import REQUESTS_FILE, SUMMARY_FILE
from spec_lab.record.reading import read_run
from spec_lab.record.recorder import ended, write_run


class FakeRunner:
    """A runner that remembers what it was given, writes the record of a finished run, and fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Run, dict[str, str], Path]] = []
        self.error: BaseException | None = None
        self.begins = True
        self.errors: dict[int, BaseException] = {}

    def record_run(self, chosen: Run, choices: dict[str, str], folder: Path, last: Any = None) -> models.Run:
        config = chosen
        self.calls.append((config, choices, folder))
        if self.begins:
            (folder / REQUESTS_FILE).touch()
        error = self.errors.get(config.seed, self.error)
        if error is not None:
            raise error
        write_run(folder, ended(read_run(folder), "finished", "the fake runner is done"))
        return read_run(folder)


def code_of(arguments: list[str]) -> Any:
    """The exit code of a multirun with jobs that do not finish."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def summaries(folder: Path) -> dict[str, dict[str, Any]]:
    """The records below `folder` by the name of theirs."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.rglob(SUMMARY_FILE))}
