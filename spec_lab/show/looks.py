"""The look of each origin of a token: a word, a mark for terminals without colours, and its colours."""

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
        ansi: parameters of the escape sequence that sets the colours of the text and its background; 0 sets none.
        background: the background in HTML, with black text on it.
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
