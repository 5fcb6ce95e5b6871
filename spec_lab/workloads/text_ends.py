"""Finds where the text of each token ends in a decoded output."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.workloads.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""The character to which a tokenizer decodes the first bytes of a character whose last bytes are in the next token."""


def text_ends(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int] | None:
    """Return for each token how many characters of `text` the tokens up to and including it give.

    A token that only begins a character adds none, unless it is the last; the token that completes it adds it. A piece
    is the tokens up to the next whole character. Each piece is decoded together with the one before it, since
    tokenizers treat the first token of a text differently.

    Returns:
        A number for each token; None if the decoded pieces do not add up to `text`.
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
