"""Handles prompts that cannot be used: `workload.unusable` says whether the run is refused or they are left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from spec_lab.config.choices import Unusable
from spec_lab.core.errors import UserError, one_line

Item = TypeVar("Item")
Made = TypeVar("Made")
MOST_LINES = 20
NO_SYSTEM = "leave out workload.system, and `system` or a turn of the system or developer in a line"


class UnusablePrompt(UserError):
    """One prompt cannot be used, for the reason in the message; others may be usable."""


def keep_usable(items: Iterable[Item], make: Callable[[Item], Made], unusable: Unusable) -> list[Made]:
    """Return `make(item)` for all `items`, without those for which it raises UnusablePrompt.

    Raises:
        UnusablePrompt: an item cannot be used, and `unusable` says to refuse it.
    """
    kept: list[Made] = []
    left_out: list[UnusablePrompt] = []
    for item in items:
        try:
            kept.append(make(item))
        except UnusablePrompt as error:
            left_out.append(error)
    if left_out and unusable == Unusable.refuse:
        advice = "workload.unusable=skip leaves such prompts out" if kept else "no prompt can be used; mend them"
        raise UnusablePrompt(f"{left_out[0]} ({advice})") from left_out[0]
    for reason in left_out[:MOST_LINES]:
        print(f"left out: {one_line(reason)}", file=sys.stderr)
    if len(left_out) > MOST_LINES:
        print(f"left out: {len(left_out) - MOST_LINES} more prompts", file=sys.stderr)
    return kept
