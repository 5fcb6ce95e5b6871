"""The last word on a run whose recorder could not say it, as on a full disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

from spec_lab.core.regular import regular_text
from spec_lab.record.schema import Status
from spec_lab.record.sinks import SUMMARY_FILE, write_json

BYTES_PER_BLOCK = 512
"""The unit of `st_blocks`, whatever the file system's own is."""


def amend_status(folder: Path, status: Status, reason: str) -> None:
    """Let the record in `folder`, which says that the run goes on, say how it ended.

    Raises:
        OSError: there is no room even in the place that the record has.
    """
    path = folder / SUMMARY_FILE
    summary = json.loads(regular_text(path)) | {"status": status, "reason": reason}
    try:
        write_json(path, summary)
    except OSError:
        _overwrite(path, json.dumps(summary, ensure_ascii=False).encode())


def _overwrite(path: Path, content: bytes) -> None:
    """Write in place, which needs no new block: only where `content` fits into those that the file has."""
    with path.open("r+b") as file:
        status = os.fstat(file.fileno())
        if len(content) > max(status.st_size, status.st_blocks * BYTES_PER_BLOCK):
            raise OSError(f"{path.name} has no room for {len(content)} bytes")
        file.write(content)
        file.truncate()
