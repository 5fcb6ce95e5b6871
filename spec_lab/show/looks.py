"""The look of each origin: a word, a mark if there are no colours, and its colours in terminals and in HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from spec_lab.core.origins import TokenOrigin
from spec_lab.show.rounds import Token


@dataclass(frozen=True, slots=True)
class OriginLook:
    """The look of one origin.

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
    """Return the origins that occur, in order, with the number of tokens of each."""
    found = Counter(token.origin for token in tokens)
    return [(look, found[origin]) for origin, look in LOOKS.items() if found[origin]]
