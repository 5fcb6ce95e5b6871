"""The sinks of records. A run always writes files, and may send the same rows to other sinks."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from spec_lab.core.errors import UserError, describe_os_error
from spec_lab.record.row_schema import RequestRow, RoundRow
from spec_lab.record.schema import Summary
from spec_lab.record.trace import TRACE_FILE

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
REQUESTS_FILE = "requests.jsonl"
ROUNDS_FILE = "rounds.jsonl"
VERIFY_ROWS_FILE = "verify_rows.safetensors"
SWEEP_FILE = "sweep.json"
"""How many jobs a sweep had and how they ended. It is written after the last job, and removed when the sweep is
continued, so a killed sweep has none."""
OF_A_RECORD = (SUMMARY_FILE, CONFIG_FILE, REQUESTS_FILE, ROUNDS_FILE, VERIFY_ROWS_FILE, TRACE_FILE, SWEEP_FILE)
"""The names of the files that no command replaces with a table or a page."""


class Sink(Protocol):
    """Receives the rows of one run. `start` is called first and `finish` last, even if the run failed."""

    def start(self, folder: Path, summary: Summary) -> None:
        """Begin the record. `folder` is the run's own; `summary` has the config and provenance, but no results yet."""
        ...

    def round(self, row: RoundRow) -> None: ...

    def request(self, row: RequestRow) -> None: ...

    def finish(self, summary: Summary) -> None: ...


class FileSink:
    """Writes `config.yaml`, `summary.json`, and a line for each row in `requests.jsonl` and `rounds.jsonl`.

    `summary.json` exists and is valid at any time. It says `interrupted` from the start, so a killed run has the right
    status. A kill or a full disk can cut off the last line of a JSON Lines file, but no earlier line.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._requests: LineFile | None = None
        self._rounds: LineFile | None = None

    def start(self, folder: Path, summary: Summary) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        write_json(folder / SUMMARY_FILE, summary)
        write_config(folder / CONFIG_FILE, summary["config"])
        self._requests = LineFile(folder / REQUESTS_FILE)
        self._rounds = LineFile(folder / ROUNDS_FILE)

    def round(self, row: RoundRow) -> None:
        assert self._rounds is not None, "start() opens the files"
        self._rounds.write(row)

    def request(self, row: RequestRow) -> None:
        assert self._requests is not None, "start() opens the files"
        self._requests.write(row)

    @contextmanager
    def requests_anew(self) -> Iterator[None]:
        """Write the requests again inside the block; the old lines stand until all new ones do."""
        assert self._requests is not None, "start() opens the files"
        old, self._requests = self._requests, LineFile(self._folder / f".{REQUESTS_FILE}.tmp")
        try:
            yield
        finally:
            old.close()
            (self._folder / f".{REQUESTS_FILE}.tmp").replace(self._folder / REQUESTS_FILE)

    def finish(self, summary: Summary) -> None:
        for lines in (self._requests, self._rounds):
            assert lines is not None, "start() opens the files"
            lines.close()
        write_json(self._folder / SUMMARY_FILE, summary)


class LineFile:
    """A JSON Lines file, empty at first. Each line is written to the system at once, without a buffer."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            ValueError: a NaN or an infinity, which JSON does not have; nothing is written.
        """
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        rest = memoryview(f"{text}\n".encode())
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write strict JSON so that a reader sees the whole old file or the whole new one.

    Raises:
        ValueError: a NaN or an infinity, which JSON does not have.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    replace_text(path, text + "\n")


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved config as YAML, as Hydra would read it."""
    from omegaconf import OmegaConf

    replace_text(path, OmegaConf.to_yaml(OmegaConf.create(dict(config))))


def write_asked(flag: str, path: Path, text: str) -> None:
    """Write a file whose name the user gave with `flag`.

    Raises:
        UserError: the file cannot be written, or it exists and has a name of `OF_A_RECORD`.
    """
    if path.name in OF_A_RECORD and path.exists():
        raise UserError(
            f"{flag}={path} exists and may be part of a record, which would be destroyed; name another file"
        )
    try:
        replace_text(path, text)
    except OSError as error:
        raise UserError(f"{flag}={path} cannot be written ({describe_os_error(error)}); name another file") from error


def replace_text(path: Path, text: str) -> None:
    """Do the same as `replace_bytes`, with text."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file so that the old one stays complete until the new one is complete, even if the process is killed.

    The temporary file has a fixed name, since only one process writes it. After a kill the next write replaces it.

    Raises:
        OSError: the file cannot be written, or `path` is something other than a file, such as a device.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if path.name in ("", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
