"""A prompt that cannot be used: the run is refused, or it is left out and named, as `workload.unusable` says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from spec_lab.core.errors import UserError, one_line
from spec_lab.menu.choices import Unusable

Item = TypeVar("Item")
Made = TypeVar("Made")
MOST_LINES = 20


class UnusablePrompt(UserError):
    """Says what is wrong with one prompt, while the others may be well."""


def keep_usable(items: Iterable[Item], make: Callable[[Item], Made], unusable: Unusable) -> list[Made]:
    """Call `make` for each of `items`, and leave out those of which it says that they cannot be used.

    Raises:
        UnusablePrompt: there is one, and the run is to refuse it.
    """
    kept: list[Made] = []
    left_out: list[UnusablePrompt] = []
    for item in items:
        try:
            kept.append(make(item))
        except UnusablePrompt as error:
            if unusable == Unusable.refuse:
                raise UnusablePrompt(f"{error} (workload.unusable=skip leaves such prompts out)") from error
            left_out.append(error)
    for reason in left_out[:MOST_LINES]:
        print(f"left out: {one_line(reason)}", file=sys.stderr)
    if len(left_out) > MOST_LINES:
        print(f"left out: {len(left_out) - MOST_LINES} more prompts", file=sys.stderr)
    return kept
