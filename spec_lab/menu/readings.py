"""A checkpoint leaves choices open: how a run makes one, and the other ways, which the doctor tries.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a checkpoint.

    Attributes:
        make: builds the `DrafterFactory` when it is scored, so that one reading is in memory at a time.
        min_draft_tokens: 2 where only later drafts can differ.
    """

    name: str
    make: Callable[[], Any]
    min_draft_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Aspect:
    """A choice, how it is made in this run, and the other ways."""

    name: str
    configured: str
    readings: list[Reading]
