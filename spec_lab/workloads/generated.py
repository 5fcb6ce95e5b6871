"""Prompts drawn from the corpus's eval split, as many as a study needs; the shipped ones are 96 a category.

No training text was drawn from that split. The corpus is imported only when a workload asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from spec_lab.core.errors import UserError
from spec_lab.corpus.example import ANSWER_MARKER, Example

# Prompts hardly repeat; so many draws in a row without a new one mean that there is none left.
MOST_REPEATS = 10_000


def generated_examples(
    categories: Sequence[str] | None, per_category: int, seed: int, limit: int | None = None
) -> dict[str, list[Example]]:
    """Return `per_category` examples of each checkable category (None: all of them), no prompt twice, the same for a
    `seed`.

    With a `limit` no more are drawn than are needed for so many in all, taken from the categories in turn.

    Raises:
        UserError: a category does not exist, has no answer that a program can check, or has fewer prompts than asked.
    """
    from spec_lab.corpus.categories import CHECKABLE_CATEGORIES

    unknown = sorted(set(categories or ()) - set(CHECKABLE_CATEGORIES))
    if unknown:
        raise UserError(
            f"workload.categories: nothing checkable is generated for {', '.join(unknown)}; "
            f"there are {', '.join(CHECKABLE_CATEGORIES)}"
        )
    chosen = categories or CHECKABLE_CATEGORIES
    count = per_category if limit is None else min(per_category, -(-limit // len(chosen)))
    return {name: list(_draw(name, count, seed)) for name in chosen}


def answer_of(example: Example) -> str:
    """Return the answer that the checker expects."""
    return example.answer.removeprefix(ANSWER_MARKER).strip()


@cache
def _draw(category: str, count: int, seed: int) -> tuple[Example, ...]:
    """Draw them once, since the jobs of a sweep draw the same prompts again and again."""
    from spec_lab.corpus.categories import generate

    chosen: dict[str, Example] = {}
    num_repeats = 0
    for example in generate(category, "eval", seed):
        num_repeats = num_repeats + 1 if example.prompt in chosen else 0
        chosen.setdefault(example.prompt, example)
        if len(chosen) == count:
            break
        if num_repeats > MOST_REPEATS:
            raise UserError(
                f"workload.per_category={count}: no more than {len(chosen)} different prompts of {category} are found; "
                f"use workload.per_category={len(chosen)}"
            )
    return tuple(chosen.values())
