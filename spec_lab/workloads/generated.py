"""Draws as many prompts as a study needs from the corpus's eval split. Only 96 prompts of each category are shipped.

No training text was drawn from that split. The generators are imported only if a workload needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from spec_lab.core.errors import UserError
from spec_lab.corpus.example import ANSWER_MARKER, Example

# Prompts hardly repeat. After this many draws in a row without a new one, drawing ends with an error.
MOST_REPEATS = 10_000


def generated_examples(
    categories: Sequence[str] | None, per_category: int, seed: int, limit: int | None = None
) -> dict[str, list[Example]]:
    """Return `per_category` examples of each of the `categories`; None means all checkable ones. No prompt is repeated,
    and a `seed` always gives the same examples.

    With a `limit`, no category gives more than `limit` / number of categories, rounded up, since prompts are then taken
    from the categories in turn.

    Raises:
        UserError: a category does not exist, is not checkable by a program, or has fewer than `per_category` prompts.
    """
    from spec_lab.corpus.categories import CHECKABLE_CATEGORIES

    unknown = sorted(set(categories or ()) - set(CHECKABLE_CATEGORIES))
    if unknown:
        raise UserError(
            f"workload.categories: no checkable problems are generated for {', '.join(unknown)}; use some of "
            f"{', '.join(CHECKABLE_CATEGORIES)}"
        )
    chosen = categories or CHECKABLE_CATEGORIES
    count = per_category if limit is None else min(per_category, -(-limit // len(chosen)))
    return {name: list(_draw(name, count, seed)) for name in chosen}


def answer_of(example: Example) -> str:
    """Return the example's answer as the checker expects it."""
    return example.answer.removeprefix(ANSWER_MARKER).strip()


@cache
def _draw(category: str, count: int, seed: int) -> tuple[Example, ...]:
    """Draw the examples of a category. They are cached, since jobs of a sweep mostly draw the same ones."""
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
                f"workload.per_category: {count} prompts of {category} are needed, and only {len(chosen)} different "
                f"ones were found; use workload.per_category={len(chosen)}"
            )
    return tuple(chosen.values())
