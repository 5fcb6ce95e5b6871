"""Identifies the prompts that a run was given."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256

from spec_lab.core.errors import UserError
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.runs import Run


def prompts_id(run: Run) -> str | None:
    """Return eight hexadecimal digits that are the same for runs over the same request ids and prompts in any order;
    None if the run did not finish, or its requests cannot be read."""
    if run.summary["status"] != "finished":
        return None
    try:
        return digest(read_all_request_rows(run.folder, run.summary))
    except UserError:
        return None


def digest(rows: Iterable[RequestRow]) -> str:
    """Hash the ids of the requests and their prompts' tokens."""
    prompts = sorted((row["id"], row["prompt_ids"]) for row in rows)
    return sha256(json.dumps(prompts).encode()).hexdigest()[:8]
