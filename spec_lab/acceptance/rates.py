"""Checks imposed acceptance rates, and derives them from a mean acceptance length.

This module does not import torch, so that a wrong list is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from spec_lab.core.errors import UserError


def expand_mean_length(mean_length: float, num_draft_tokens: int) -> tuple[float, ...]:
    """Return unconditional rates for each position that give `mean_length` with the least variance.

    2.5 at K = 3 gives (1, .5, 0): draft 1 is always accepted, draft 2 in half of the rounds, and draft 3 never.

    Raises:
        UserError: a mean outside 1..K + 1.
    """
    if not 1 <= mean_length <= num_draft_tokens + 1:
        raise UserError(
            f"acceptance.mean_length={mean_length} is outside 1..{num_draft_tokens + 1}, the range with "
            f"drafter.num_draft_tokens={num_draft_tokens}; use acceptance.mean_length="
            f"{1 + num_draft_tokens / 2:g}"
        )
    return tuple(min(max(mean_length - 1 - position, 0.0), 1.0) for position in range(num_draft_tokens))


def check_rates(rates: Sequence[float], num_draft_tokens: int) -> None:
    """Raise UserError if `rates` cannot be unconditional acceptance rates of K positions."""
    falls = all(0 <= later <= earlier <= 1 for earlier, later in pairwise([1.0, *rates]))
    if len(rates) != num_draft_tokens or not falls:
        raise UserError(
            f"acceptance.rates={list(rates)} must be {num_draft_tokens} unconditional rates from 0 to 1, one for each "
            "position, that do not increase"
        )
