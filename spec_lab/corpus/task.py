"""A checkable category gives a problem that can name itself, ask itself, and solve itself aloud."""

from __future__ import annotations

from random import Random
from typing import Protocol

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.phrasing import Phraser


class Task(Protocol):
    """One problem. It is drawn before any wording is, so that its split can be decided first."""

    @property
    def key(self) -> str:
        """The numbers and names that define the problem; equal keys are the same problem in other words."""
        ...

    @property
    def answer(self) -> str: ...

    def question(self, say: Phraser) -> str:
        """Return the whole task in words: whoever reads it alone can find the answer."""
        ...

    def steps(self, say: Phraser) -> list[str]:
        """Return sentences that lead to the answer, in order."""
        ...


class DrawTask(Protocol):
    """Draws a problem of one category."""

    def __call__(self, random: Random, difficulty: Difficulty) -> Task: ...


def draw_between(random: Random, bounds: tuple[int, int]) -> int:
    """Draw an integer within inclusive `bounds`."""
    low, high = bounds
    return low + int(random.random() * (high - low + 1))
