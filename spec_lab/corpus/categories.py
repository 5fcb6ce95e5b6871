"""Endless examples of each category, in a train and an eval split that share no problem and no document.

The examples depend on the seed. Those with natural text also depend on the Python version.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from spec_lab.corpus.arithmetic import draw_arithmetic
from spec_lab.corpus.dates import draw_dates
from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.example import Example
from spec_lab.corpus.lists import draw_lists
from spec_lab.corpus.lookup import draw_lookup
from spec_lab.corpus.natural import prose_sentences
from spec_lab.corpus.natural_examples import draw_natural_example
from spec_lab.corpus.order import draw_order
from spec_lab.corpus.split import Split, split_of
from spec_lab.corpus.task import DrawTask
from spec_lab.corpus.thought import tell
from spec_lab.corpus.trace import draw_trace
from spec_lab.corpus.units import draw_units

TASKS: dict[str, DrawTask] = {
    "arithmetic": draw_arithmetic,
    "lists": draw_lists,
    "trace": draw_trace,
    "dates": draw_dates,
    "units": draw_units,
    "order": draw_order,
    "lookup": draw_lookup,
}
DEFAULT_DIFFICULTY = Difficulty()
CHECKABLE_CATEGORIES: tuple[str, ...] = tuple(TASKS)
NATURAL_CATEGORIES: tuple[str, ...] = ("code", "prose")
CATEGORIES: tuple[str, ...] = CHECKABLE_CATEGORIES + NATURAL_CATEGORIES


def generate(category: str, split: Split, seed: int, difficulty: Difficulty = DEFAULT_DIFFICULTY) -> Iterator[Example]:
    """Yield examples of `category` without end. Raises ValueError for a category that does not exist.

    The hash of a checkable problem's key decides its split, whatever the seed, wording or difficulty.
    """
    if category not in CATEGORIES:
        raise ValueError(f"category={category!r} is not one of {', '.join(CATEGORIES)}")
    random = Random(f"{category}/{split}/{seed}")
    if category in NATURAL_CATEGORIES:
        return _generate_natural(category, split, random)
    return _generate_checkable(category, split, random, difficulty)


def _generate_natural(category: str, split: Split, random: Random) -> Iterator[Example]:
    while True:
        yield draw_natural_example(category, split, random)


def _generate_checkable(category: str, split: Split, random: Random, difficulty: Difficulty) -> Iterator[Example]:
    draw = TASKS[category]
    prose = difficulty.lists_prose if category == "lists" else difficulty.prose
    sentences = prose_sentences(split)
    while True:
        task = draw(random, difficulty)
        if split_of(f"{category}: {task.key}") == split:
            yield tell(category, task, prose, sentences, random)
