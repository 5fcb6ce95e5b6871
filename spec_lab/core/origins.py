"""Says where each token of an output came from, a letter a token."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class TokenOrigin(StrEnum):
    """The letter of each origin, as `requests.jsonl` has them: one string a request, as long as its output."""

    PROMPT_PASS = "p"
    """The first token: sampled by the prompt pass, before any draft."""
    ACCEPTED = "a"
    """A draft that the rule accepted."""
    RELAXED = "r"
    """A draft that only a relaxed rule accepts: it is not the target's argmax."""
    CORRECTED = "c"
    """The target's own token, in the place of the first draft that was not accepted."""
    BONUS = "b"
    """The target's own token behind the last draft that was offered; every token of plain decoding, which has none."""


def round_origins(num_emitted: int, num_offered: int, relaxed: Sequence[int] | None) -> str:
    """Return the letters of the tokens that one round emitted, before any cut.

    Args:
        num_offered: drafts that could have been accepted, K unless fewer were offered.
        relaxed: an entry a draft, whether it was accepted only because the rule relaxed; None for a rule that never
            does.
    """
    num_accepted = num_emitted - 1
    last = TokenOrigin.BONUS if num_accepted == num_offered else TokenOrigin.CORRECTED
    if relaxed is None:  # asked once a request and round: no loop over the drafts
        return TokenOrigin.ACCEPTED * num_accepted + last
    hits = relaxed[:num_accepted]
    return "".join([*(TokenOrigin.RELAXED if hit else TokenOrigin.ACCEPTED for hit in hits), last])
