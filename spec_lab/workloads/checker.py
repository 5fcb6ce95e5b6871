"""Decides whether a generated text ends with the expected answer."""

from __future__ import annotations

from spec_lab.corpus.example import ANSWER_MARKER, END_OF_TURN, THINK_END


def normalise(answer: str) -> str:
    """Lower case, single spaces, no full stop at the end: spelling that does not change an answer is ignored."""
    return " ".join(answer.split()).rstrip(".").rstrip().lower()


def extract_answer(text: str) -> str | None:
    """The normalised rest of the line after the last `Answer:` behind the last `</think>`.

    None where there is no such line. A text cut off inside its thinking has no `</think>`, hence no answer, even if the
    thinking already mentions one.
    """
    _, closed, reply = text.rpartition(THINK_END)
    if not closed:
        return None
    _, found, rest = reply.rpartition(ANSWER_MARKER)
    if not found:
        return None
    line = rest.partition("\n")[0].partition(END_OF_TURN)[0]
    return normalise(line) or None


def is_correct(expected: str, text: str) -> bool:
    """Tells whether `text` (what the model wrote after the prompt) answers `expected`."""
    return extract_answer(text) == normalise(expected)
