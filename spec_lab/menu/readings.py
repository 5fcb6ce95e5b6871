"""Choices that a checkpoint leaves open: how a run makes each, and the alternatives, which the doctor tries.

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
        min_draft_tokens: 2 if only later drafts can differ.
    """

    name: str
    make: Callable[[], Any]
    min_draft_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Aspect:
    """A choice, how this run makes it, and the alternatives."""

    name: str
    configured: str
    readings: list[Reading]
