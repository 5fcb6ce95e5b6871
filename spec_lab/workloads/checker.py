"""Decides whether a generated text has the expected answer, according to its prompt's checker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spec_lab.workloads.checkers import normalise, read_line
from spec_lab.workloads.pocket_form import END_OF_TURN, THINK_END, THINK_START

THINKING_MARKERS = ((THINK_START, THINK_END), ("<|channel>", "<channel|>"))
"""Pairs of a begin and an end marker: one of the pocket target, Qwen and DeepSeek, and one of Gemma 4."""

TURN_ENDS = (END_OF_TURN, "<turn|>")
"""Tokens that end a turn: the pocket target's, and Gemma 4's."""


class Checker(Protocol):
    """Reads the answer in a reply, and compares answers; a registered option of `workload.checker` is one."""

    @property
    def name(self) -> str: ...

    def read(self, reply: str, /) -> str | None:
        """Return the answer in a reply without thinking; None if there is none."""
        ...

    def same(self, expected: str, answer: str, /) -> bool:
        """Return whether the answer that was read equals the expected one."""
        ...


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


def check(checker: Checker, expected: str, text: str, thinking_open: bool = False) -> Checked:
    """Check `text`, which the model wrote after the prompt.

    Args:
        thinking_open: whether the prompt ends inside thinking, as some chat templates write it.

    Raises:
        TypeError: a checker of an extension returns a value that is not an answer and cannot be recorded.
    """
    reply = reply_of(text, thinking_open)
    read = None if reply is None else checker.read(reply)
    if not isinstance(read, str | None):
        raise TypeError(f"read gives a {type(read).__name__}, neither a text nor None")
    correct = read is not None and checker.same(expected, read)
    if not isinstance(correct, bool):
        raise TypeError(f"same gives a {type(correct).__name__}, neither True nor False")
    return Checked(checker.name, read, correct)


def reply_of(text: str, thinking_open: bool = False) -> str | None:
    """Return the text after the last thinking, or from its start if there is none, up to the end of the turn.

    It is None if the text ends inside thinking, since it then has no answer yet.
    """
    replies = [text.rpartition(end)[2] for _, end in THINKING_MARKERS if end in text]
    reply = min(replies, key=len) if replies else text
    for end in TURN_ENDS:
        reply = reply.partition(end)[0]
    is_open = any(begin in reply for begin, _ in THINKING_MARKERS) or (thinking_open and not replies)
    return None if is_open else reply


def is_correct(expected: str, text: str) -> bool:
    """Return whether the reply in `text` has `expected` after its last `Answer:`, which the shipped prompts ask for."""
    reply = reply_of(text)
    return reply is not None and read_line(reply) == normalise(expected)
