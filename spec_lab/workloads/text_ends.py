"""This module finds which stretch of a decoded text each token wrote."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.workloads.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""This says what a decoder writes for the first bytes of a character whose last ones stand in the next token."""


def text_ends(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int] | None:
    """Count for each token how many characters of `text` stand once it is decoded; None where that cannot be said.

    A token that only begins a character adds none; the one that completes it adds the character. Decoding goes on from
    the last place where a token ended on a whole character, with the token before it in front, since decoders treat
    the first token of a text as a case of its own.
    """
    ends: list[int] = []
    written = ""
    first, settled = 0, 0
    for end in range(1, len(token_ids) + 1):
        known = tokenizer.decode(token_ids[first:settled])
        longer = tokenizer.decode(token_ids[first:end])
        if not longer.endswith(UNFINISHED):
            if not longer.startswith(known):
                return None
            written += longer[len(known) :]
            first, settled = settled, end
        ends.append(len(written))
    if not text.startswith(written) or (text and not ends):
        return None
    return [*ends[:-1], len(text)] if ends else []  # an output may end inside a character
