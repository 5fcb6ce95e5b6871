"""Amends the record of a run that its recorder did not end."""

from __future__ import annotations

import json
from pathlib import Path

from spec_lab.record.schema import Status
from spec_lab.record.sinks import SUMMARY_FILE, write_json


def amend_status(folder: Path, status: Status, reason: str) -> None:
    """Write how the run ended into the record in `folder`."""
    path = folder / SUMMARY_FILE
    write_json(path, json.loads(path.read_text()) | {"status": status, "reason": reason})
