"""The one thing that is asked of whatever reads a file from elsewhere: it reads it, or says why not in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError


def read_or_refused(read: Callable[[], Any], *names: str | Path) -> Any:
    """What `read` gives; None where it refuses, which it must in one line that holds `names`."""
    try:
        return read()
    except UserError as error:
        message = str(error)
    assert "\n" not in message and len(message) < 700, message
    assert all(str(name) in message for name in names), message
    return None
