"""Says how each origin is shown: a word, a mark where there is no colour, and the colours of terminals and of pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from spec_lab.core.origins import TokenOrigin
from spec_lab.show.rounds import Token


@dataclass(frozen=True, slots=True)
class OriginLook:
    """One origin's.

    Attributes:
        ansi: parameters of the escape sequence: black on a background that differs by its lightness too.
        background: of a page, with black text on it.
    """

    word: str
    mark: str
    ansi: str
    background: str


LOOKS: dict[TokenOrigin | None, OriginLook] = {
    TokenOrigin.PROMPT_PASS: OriginLook("prompt pass", "^", "30;47", "#dddddd"),
    TokenOrigin.ACCEPTED: OriginLook("accepted", "+", "30;42", "#a8e0b0"),
    TokenOrigin.RELAXED: OriginLook("relaxed", "~", "30;43", "#ffe08a"),
    TokenOrigin.CORRECTED: OriginLook("corrected", "!", "97;41", "#f5a9a0"),
    TokenOrigin.BONUS: OriginLook("bonus", "*", "30;46", "#a5cdf5"),
    None: OriginLook("unknown", "?", "0", "#ffffff"),
}


def counts(tokens: Iterable[Token]) -> list[tuple[OriginLook, int]]:
    """Return the origins that there are, in their order, and how many tokens of each."""
    found = Counter(token.origin for token in tokens)
    return [(look, found[origin]) for origin, look in LOOKS.items() if found[origin]]
