"""Helpers that say which rows of a product of parameters run in the default tier, which is a matter of minutes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def checkerboard(*axes: Iterable[Any], colours: int = 2) -> list[Any]:
    """The product of the axes for `parametrize`: its black fields run by default, its other ones in the slow tier.

    So every value of an axis of `colours` or more still meets one in `colours` of the values of each other axis by
    default, and all in both tiers together. Not for axes where one pair of values is the point of the test.
    """
    rows = []
    for row in product(*(list(enumerate(axis)) for axis in axes)):
        is_black = sum(place for place, _ in row) % colours == 0
        rows.append(pytest.param(*(value for _, value in row), marks=[] if is_black else pytest.mark.slow))
    return rows


def every_other(rows: Iterable[Any], values: int = 1) -> list[Any]:
    """The rows for `parametrize`, of `values` values each: the first, third, ... by default, the others as slow ones.

    For long tables of cases of one kind, each of which costs the same.
    """
    tuples = (row if values > 1 else (row,) for row in rows)
    return [pytest.param(*row, marks=pytest.mark.slow if place % 2 else []) for place, row in enumerate(tuples)]
