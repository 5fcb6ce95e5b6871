"""Whose mistake an error is, and how one is put in a line."""

from __future__ import annotations

import traceback
from pathlib import Path


class UserError(ValueError):
    """What was asked for cannot be done. The message names the knob or the file, and the remedy.

    The command line answers it with one line and exit code 2; any other exception is a failure of ours, with its
    traceback.
    """


def describe_error(error: BaseException) -> str:
    """The class of an exception with its message, or, where an error carries none, the place it was raised at."""
    kind, message = type(error).__name__, str(error).strip()
    if message:
        return f"{kind}: {message}"
    places = traceback.extract_tb(error.__traceback__) if isinstance(error, Exception) else []
    return f"{kind} at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else kind


def not_among(knob: str, value: str, allowed: tuple[str, ...]) -> str | None:
    return None if value in allowed else f"{knob}={value} is unknown; use one of {', '.join(allowed)}"
