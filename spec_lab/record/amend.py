"""Amends the record of a run whose recorder could not write how it ended, as on a full disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

from spec_lab.core.regular import regular_text
from spec_lab.record.schema import Status
from spec_lab.record.sinks import SUMMARY_FILE, write_json

BYTES_PER_BLOCK = 512
"""The unit of `st_blocks`, on every file system."""


def amend_status(folder: Path, status: Status, reason: str) -> None:
    """Write how the run ended into the record in `folder`, whose reason still says that the run has not ended.

    Raises:
        OSError: the record cannot be read, or the disk is full and the amended record does not fit in place of the old
            one.
    """
    path = folder / SUMMARY_FILE
    summary = json.loads(regular_text(path)) | {"status": status, "reason": reason}
    try:
        write_json(path, summary)
    except OSError:
        _overwrite(path, json.dumps(summary, ensure_ascii=False).encode())


def _overwrite(path: Path, content: bytes) -> None:
    """Write in place, if `content` fits into the blocks that the file has, so that no new block is needed."""
    with path.open("r+b") as file:
        status = os.fstat(file.fileno())
        if len(content) > max(status.st_size, status.st_blocks * BYTES_PER_BLOCK):
            raise OSError(f"{path.name} cannot hold {len(content)} bytes")
        file.write(content)
        file.truncate()
