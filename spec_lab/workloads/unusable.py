"""Handles prompts that cannot be used: `workload.unusable` says whether the run is refused or they are left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from spec_lab.config.choices import Unusable
from spec_lab.core.errors import describe_error

Item = TypeVar("Item")
Made = TypeVar("Made")
BROKEN = (ValueError, LookupError, TypeError, AttributeError)
"""What reading a broken line raises. A `UserError` is a ValueError."""


def keep_usable(items: Iterable[Item], make: Callable[[Item], Made], unusable: Unusable) -> list[Made]:
    """Return `make(item)` for all `items`; with `workload.unusable=skip`, without those for which it raises."""
    kept: list[Made] = []
    for item in items:
        try:
            kept.append(make(item))
        except BROKEN as error:
            if unusable == Unusable.refuse:
                raise
            where = getattr(error, "__notes__", ())
            print("left out:", describe_error(error), *where, file=sys.stderr)
    return kept
