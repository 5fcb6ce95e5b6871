"""Decides whether a generated text ends with the expected answer."""

from __future__ import annotations

import re

from spec_lab.corpus.example import ANSWER_MARKER
from spec_lab.workloads.thinking import THINKING_MARKERS, TURN_ENDS

_ANY_TURN_END = re.compile("|".join(map(re.escape, TURN_ENDS)))


def normalise(answer: str) -> str:
    """Fold what does not change an answer: lower case, single spaces, no full stop at the end."""
    return " ".join(answer.split()).rstrip(".").rstrip().lower()


def extract_answer(text: str, thinks: bool = True) -> str | None:
    """Return the normalised rest of the line after the last `Answer:` behind the last marker that ends thinking.

    None where there is no such line. A text cut off inside its thinking has no such marker, hence no answer, even if
    the thinking already mentions one. All that a model says is its reply where it has no such markers (`thinks` false).
    """
    replies = [text.rpartition(end)[2] for _, end in THINKING_MARKERS if end in text] or ([] if thinks else [text])
    if not replies:
        return None
    _, found, rest = min(replies, key=len).rpartition(ANSWER_MARKER)
    if not found:
        return None
    line = _ANY_TURN_END.split(rest.partition("\n")[0])[0]
    return normalise(line) or None


def is_correct(expected: str, text: str, thinks: bool = True) -> bool:
    """Tell whether `text` (what the model wrote after the prompt) answers `expected`; `thinks` is as above."""
    return extract_answer(text, thinks) == normalise(expected)
