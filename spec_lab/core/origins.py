"""The origin of each output token, as one letter."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class TokenOrigin(StrEnum):
    """The letter of each origin. `requests.jsonl` has a string for each request, with one letter for each output
    token."""

    PROMPT_PASS = "p"
    """The first token: sampled by the prompt pass, before any draft."""
    ACCEPTED = "a"
    """A draft that the rule accepted."""
    RELAXED = "r"
    """A draft that a relaxed rule (acceptance=relaxed_thinking) accepted, although it is not the target's argmax."""
    CORRECTED = "c"
    """The target's own token, instead of the first rejected draft; in a tree also after a leaf above the last level."""
    BONUS = "b"
    """The target's own token after the last offered draft. In plain decoding it is every token after the first."""


def round_origins(num_emitted: int, num_offered: int, relaxed: Sequence[int] | None) -> str:
    """Return the letters of the tokens that one round emitted, before any cut.

    Args:
        num_offered: drafts that could have been accepted: K, unless fewer were offered.
        relaxed: for each draft, whether it was accepted only by relaxation; None for a rule that never relaxes.
    """
    num_accepted = num_emitted - 1
    last = TokenOrigin.BONUS if num_accepted == num_offered else TokenOrigin.CORRECTED
    if relaxed is None:  # called for every request in every round, so this avoids a loop over drafts
        return TokenOrigin.ACCEPTED * num_accepted + last
    hits = relaxed[:num_accepted]
    return "".join([*(TokenOrigin.RELAXED if hit else TokenOrigin.ACCEPTED for hit in hits), last])
