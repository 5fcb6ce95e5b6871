"""Prompts drawn from the corpus's eval split, as many as a study needs; the shipped ones are 96 a category.

No training text was drawn from that split. The corpus is imported only when a workload asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from spec_lab.corpus.example import ANSWER_MARKER, Example
from spec_lab.errors import UserError


def generated_examples(categories: Sequence[str] | None, per_category: int, seed: int) -> dict[str, list[Example]]:
    """`per_category` examples of each checkable category (None: all of them), no prompt twice, the same for a `seed`.

    Raises:
        UserError: a category does not exist, or has no answer that a program can check.
    """
    from spec_lab.corpus.categories import CHECKABLE_CATEGORIES

    unknown = sorted(set(categories or ()) - set(CHECKABLE_CATEGORIES))
    if unknown:
        raise UserError(
            f"workload.categories: nothing checkable is generated for {', '.join(unknown)}; "
            f"there are {', '.join(CHECKABLE_CATEGORIES)}"
        )
    return {name: list(_draw(name, per_category, seed)) for name in categories or CHECKABLE_CATEGORIES}


def answer_of(example: Example) -> str:
    """What the checker expects."""
    return example.answer.removeprefix(ANSWER_MARKER).strip()


@cache
def _draw(category: str, count: int, seed: int) -> tuple[Example, ...]:
    """Kept, since the jobs of a sweep draw the same prompts again and again."""
    from spec_lab.corpus.categories import generate

    chosen: dict[str, Example] = {}
    for example in generate(category, "eval", seed):
        chosen.setdefault(example.prompt, example)
        if len(chosen) == count:
            break
    return tuple(chosen.values())
