"""Decides whether a generated text has the expected answer, according to its prompt's checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_lab.workloads.checkers import Checker
from spec_lab.workloads.thinking import KNOWN_PAIRS, Pair, reply_of


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking one answer.

    Attributes:
        checker: the option that read it.
        read: the answer that it read; None if it found none.
    """

    checker: str
    read: str | None
    correct: bool


def check(
    checker: type[Checker], expected: str, text: str, thinking_open: bool = False, pairs: Sequence[Pair] = KNOWN_PAIRS
) -> Checked:
    """Check `text`, which the model wrote after the prompt.

    Args:
        thinking_open: whether the prompt ends inside thinking, as some chat templates write it.
        pairs: the begin and the end markers of thinking.

    Raises:
        TypeError: a checker of an extension returns a value that is not an answer and cannot be recorded.
    """
    reply = reply_of(text, thinking_open, pairs)
    read = None if reply is None else checker.read(reply)
    if not isinstance(read, str | None):
        raise TypeError(f"read gives a {type(read).__name__}, neither a text nor None")
    correct = read is not None and checker.same(expected, read)
    if not isinstance(correct, bool):
        raise TypeError(f"same gives a {type(correct).__name__}, neither True nor False")
    return Checked(checker.name, read, correct)
