"""Chooses cells of a table by their names, and checks them without running any. A cell is one measured configuration,
which gives a line of the table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import spec_lab
from spec_lab.config.checks import problems
from spec_lab.core.errors import UserError


class Composable(Protocol):
    """A cell of any table."""

    @property
    def name(self) -> str: ...

    def overrides(self) -> list[str]:
        """Return the overrides of the cell's run."""
        ...


ACell = TypeVar("ACell", bound=Composable)


def chosen(cells: Iterable[ACell], only: Sequence[str]) -> list[ACell]:
    """Return the cells whose name has all of `only` in it. If there are none, end the program with a message."""
    found = [cell for cell in cells if all(part in cell.name for part in only)]
    if not found:
        print(f"no cell's name has all of {only} in it", file=sys.stderr)
        sys.exit(2)
    return found


def refused(cells: Iterable[Composable]) -> int:
    """Compose `cells`, and print for each what dry_run=true prints. Return 2 if one is refused, else 0."""
    code = 0
    for cell in cells:
        try:
            composed = spec_lab.compose(cell.overrides())
        except UserError as error:
            print(f"{cell.name}: {error}", file=sys.stderr)
            code = 2
            continue
        print(f"-- {cell.name}", composed, sep="\n")
        code = 2 if any(problems(composed.config)) else code
    return code
