"""Where records go. Files always; other sinks beside them, fed the same rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from spec_lab.record.schema import RequestRow, RoundRow, Summary

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
REQUESTS_FILE = "requests.jsonl"
ROUNDS_FILE = "rounds.jsonl"


class Sink(Protocol):
    """Takes the rows of one run. `start` comes first and `finish` last, also when the run failed."""

    def start(self, folder: Path, summary: Summary) -> None:
        """`folder` is the run's own; `summary` has the config and provenance, no results yet."""
        ...

    def round(self, row: RoundRow) -> None: ...

    def request(self, row: RequestRow) -> None: ...

    def finish(self, summary: Summary) -> None: ...


class FileSink:
    """`config.yaml`, `summary.json`, and a line a row in `requests.jsonl` and `rounds.jsonl`.

    `summary.json` is there and valid at every moment: at the start it says `interrupted`, which is what a killed run
    leaves behind. Lines are flushed one by one, so that none is left half-written.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._requests: TextIO | None = None
        self._rounds: TextIO | None = None

    def start(self, folder: Path, summary: Summary) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        write_json(folder / SUMMARY_FILE, summary)
        write_config(folder / CONFIG_FILE, summary["config"])
        self._requests = _open_lines(folder / REQUESTS_FILE)
        self._rounds = _open_lines(folder / ROUNDS_FILE)

    def round(self, row: RoundRow) -> None:
        _write_line(self._rounds, row)

    def request(self, row: RequestRow) -> None:
        _write_line(self._requests, row)

    def finish(self, summary: Summary) -> None:
        for lines in (self._requests, self._rounds):
            assert lines is not None, "start() opens the files"
            lines.close()
        write_json(self._folder / SUMMARY_FILE, summary)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write strict JSON so that a reader sees the old file or the new one, never a part.

    Raises:
        ValueError: a NaN or an infinity, which JSON has not.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    _replace(path, text + "\n")


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved config as YAML, as Hydra would read it."""
    from omegaconf import OmegaConf

    _replace(path, OmegaConf.to_yaml(OmegaConf.create(dict(config))))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _open_lines(path: Path) -> TextIO:
    return path.open("w", encoding="utf-8", buffering=1)


def _write_line(lines: TextIO | None, row: Mapping[str, Any]) -> None:
    assert lines is not None, "start() opens the files"
    lines.write(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
