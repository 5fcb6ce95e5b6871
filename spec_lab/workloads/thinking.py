"""Where a model's thinking begins and ends: its two markers, and the reply behind them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.config.groups import TargetConfig
from spec_lab.core.errors import UserError
from spec_lab.workloads.pocket_form import END_OF_TURN, THINK_END, THINK_START
from spec_lab.workloads.tokenizer import Tokenizer

Pair = tuple[str, str]
KNOWN_PAIRS: Sequence[Pair] = ((THINK_START, THINK_END), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""Begin and end markers of the pocket target, Qwen and DeepSeek; of Mistral; and of Gemma 4."""

TURN_ENDS = (END_OF_TURN, "<turn|>")
"""Tokens that end a turn: the pocket target's, and Gemma 4's."""

NAMED = re.compile(r"[<\[]\|?/?[\w:]*think[\w:]*\|?[>\]]", re.IGNORECASE)
"""A marker in the text of a chat template, such as `[THINK]`, `</seed:think>` or `<|END_THINKING|>`."""


def thinking_markers(tokenizer: Tokenizer, options: TargetConfig) -> ThinkingMarkers | None:
    """Return the token ids of the markers; None if there are none.

    A marker that `target.thinking_begin` or `thinking_end` does not name, by the text of a token or its id, is the one
    that the chat template writes, or else one of the first of `KNOWN_PAIRS` whose two are tokens.

    Raises:
        UserError: a marker is not one token, or there is only one of the two.
    """
    pairs = (*_pairs_in(tokenizer.template or ""), *KNOWN_PAIRS)
    ids = (tuple(map(tokenizer.special_id, pair)) for pair in pairs)
    default = next((pair for pair in ids if None not in pair), (None, None))
    typed = options.thinking_begin, options.thinking_end
    begin, end = (own if text is None else _token_id(tokenizer, text) for text, own in zip(typed, default, strict=True))
    if begin is not None and end is not None:
        return ThinkingMarkers(begin, end)
    if typed != (None, None):
        raise UserError("target.thinking_begin, target.thinking_end: give both, each the text or the id of one token")
    return None


def thinking_pairs(tokenizer: Tokenizer, markers: ThinkingMarkers | None) -> Sequence[Pair]:
    """Return the texts of the markers; of all known ones if None, since a model may write them in several tokens."""
    if markers is None:
        return KNOWN_PAIRS
    return [(tokenizer.decode([markers.begin]), tokenizer.decode([markers.end]))]


def reply_of(text: str, thinking_open: bool = False, pairs: Sequence[Pair] = KNOWN_PAIRS) -> str | None:
    """Return the text after the last thinking, or from its start if there is none, up to the end of the turn.

    It is None if the text ends inside thinking, since it then has no answer yet.

    Args:
        thinking_open: whether the prompt ends inside thinking.
        pairs: the begin and the end markers that count.
    """
    replies = [text.rpartition(end)[2] for _, end in pairs if end in text]
    reply = min(replies, key=len) if replies else text
    for end in TURN_ENDS:
        reply = reply.partition(end)[0]
    is_open = any(begin in reply for begin, _ in pairs) or (thinking_open and not replies)
    return None if is_open else reply


def _pairs_in(template: str) -> list[Pair]:
    """Return the pairs of markers that a chat template may write. It may name only one of the two."""
    begins = (
        found.replace("/", "", 1).replace("END_", "START_").replace("end_", "begin_")
        for found in NAMED.findall(template)
    )
    return [
        (begin, end)
        for begin in dict.fromkeys(begins)
        for end in (f"{begin[0]}/{begin[1:]}", begin.replace("START_", "END_"), begin.replace("begin_", "end_"))
        if end != begin
    ]


def _token_id(tokenizer: Tokenizer, typed: str) -> int | None:
    """Return the id that was typed, or the id of the token whose text was typed; None if it is not one token."""
    if typed.isdecimal():
        return int(typed) if int(typed) < tokenizer.vocab_size else None
    if (token_id := tokenizer.special_id(typed)) is not None:
        return token_id
    ids = tokenizer.encode(typed)
    return ids[0] if len(ids) == 1 else None
