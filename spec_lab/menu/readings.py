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
        make: builds the `DrafterFactory`. It is called when the reading is scored, so that one is in memory at a time.
        min_draft_tokens: 2 if the reading cannot change the first draft.
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
