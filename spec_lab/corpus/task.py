"""The protocol of checkable problems: each has a key, a question in words, and the steps of its solution."""

from __future__ import annotations

from random import Random
from typing import Protocol

from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.phrasing import Phraser


class Task(Protocol):
    """One problem. It is drawn before its wording, so that its split is decided first."""

    @property
    def key(self) -> str:
        """The numbers and names that define the problem. Problems with equal keys differ in their wording at most."""
        ...

    @property
    def answer(self) -> str: ...

    def question(self, say: Phraser) -> str:
        """Return the problem in words, with everything that is needed to find the answer."""
        ...

    def steps(self, say: Phraser) -> list[str]:
        """Return the steps of the solution in order, as sentences."""
        ...


class DrawTask(Protocol):
    """Draws a problem of one category."""

    def __call__(self, random: Random, difficulty: Difficulty) -> Task: ...


def draw_between(random: Random, bounds: tuple[int, int]) -> int:
    """Draw an integer within inclusive `bounds`."""
    low, high = bounds
    return low + int(random.random() * (high - low + 1))
