"""Reads common formats of prompt files: chats in `messages` or ShareGPT's `conversations`, GSM8K's and HumanEval's.

From a chat the user's turns and the system prompt are used. The assistant's turns are left out, since the answers in a
conversation are plain decoding's, as in every workload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.core.errors import UserError, one_line
from spec_lab.menu.nearest import nearest
from spec_lab.workloads.pocket_form import Form
from spec_lab.workloads.unusable import UnusablePrompt

ROLES: Mapping[str, str] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "system",
}
"""The roles of a chat template, by the speakers' names in files."""
TOLD = ("answer", "checker", "system", "num_draft_tokens")
SHARED_KEYS = ("id", "category", *TOLD)
"""Keys that a line of any format may have."""
FORMATS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "form"),
    "messages": ("messages",),
    "conversations": ("conversations", "conversation_id"),
    "question": ("question",),
    "task_id": ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
}
"""The key by which a format is recognised, with all keys of that format."""
TURN_KEYS = ("role", "content", "from", "value")
MARKED_ANSWER = re.compile(r"####\s*(.+?)\s*$")
CODE, MATHS = "humaneval", "gsm8k"


@dataclass(frozen=True, slots=True)
class Turns:
    """The contents of a line: the user's turns, the system prompt, and the answer and the category if given."""

    turns: Sequence[str]
    system: str | None = None
    answer: Any = None
    checker: str | None = None
    category: str | None = None
    prompt_id: Any = None
    form: Form = "chat"


def known_keys(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that are read from a line of this format."""
    return (*FORMATS[_format(row)], *SHARED_KEYS)


def refuse_unknown(row: Mapping[str, Any], place: str) -> None:
    """Raise UnusablePrompt for a key that is not read, since a misspelt `answer` would otherwise be ignored
    silently."""
    known = known_keys(row)
    if not FORMATS.keys() & row.keys():  # it may be of any format
        known = tuple(dict.fromkeys((*known, *FORMATS)))
    for key in row:
        if key not in known:
            raise _nothing_reads(key, known, place, "a line")


def _nothing_reads(key: object, known: Sequence[str], place: str, whole: str) -> UnusablePrompt:
    near = nearest(str(key).lower(), known)
    remedy = f"did you mean {near}?" if near else f"{whole} is read for {', '.join(known)}"
    return UnusablePrompt(f"{place}: nothing reads `{one_line(key)}`; {remedy}")


def turns_of(row: Mapping[str, Any], place: str) -> Turns | None:
    """Return the contents of a line in a known format other than `prompt`; None for any other line.

    Raises:
        UnusablePrompt: it is in a known format, but broken.
    """
    readers = {"messages": _chat, "conversations": _chat, "question": _gsm8k, "task_id": _humaneval}
    kind = _format(row)
    return readers[kind](row, place) if kind in readers else None


def _format(row: Mapping[str, Any]) -> str:
    """Return the format's key in a line. HumanEval has its own key in addition to `prompt`."""
    return next((kind for kind in ("messages", "conversations", "task_id", "question") if kind in row), "prompt")


def _chat(row: Mapping[str, Any], place: str) -> Turns:
    key = "messages" if "messages" in row else "conversations"
    said = row[key]
    if not isinstance(said, list) or not said:
        raise UnusablePrompt(f"{place}: `{key}` must be a list of turns")
    turns: list[str] = []
    system: str | None = None
    for number, turn in enumerate(said, start=1):
        role, text = _turn(turn, f"{place}: turn {number} of `{key}`")
        if role == "system" and (turns or system is not None):
            raise UnusablePrompt(f"{place}: `{key}` may have one system message, before the first turn")
        if role == "system":
            system = text
        elif role == "user" and not text.strip():
            raise UnusablePrompt(f"{place}: turn {number} of `{key}` must not be empty")
        elif role == "user":
            turns.append(text)
    if not turns:
        raise UnusablePrompt(f"{place}: `{key}` has no turn of the user")
    return Turns(turns, system=system, prompt_id=row.get("conversation_id"))


def _turn(turn: Any, place: str) -> tuple[str, str]:
    said: Mapping[str, Any] = turn if isinstance(turn, dict) else {}
    role, text = said.get("role", said.get("from")), said.get("content", said.get("value"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise UnusablePrompt(f"{place} needs texts `role` and `content`, or `from` and `value`")
    if role not in ROLES:
        near = nearest(role, ROLES)
        remedy = f"did you mean {near}?" if near else f"there are {', '.join(ROLES)}"
        raise UnusablePrompt(f"{place} has the role {one_line(role)}; {remedy}")
    if ROLES[role] != "assistant":
        _refuse_unread(said, place)
    return ROLES[role], text


def _refuse_unread(turn: Mapping[str, Any], place: str) -> None:
    """Raise UnusablePrompt for other keys than the two in a turn that is used."""
    named = [key for key in TURN_KEYS if key in turn]
    if len(named) > 2:
        raise UnusablePrompt(f"{place} has {', '.join(named)}; give `role` and `content`, or `from` and `value`")
    for key in turn:
        if key not in TURN_KEYS:
            raise _nothing_reads(key, TURN_KEYS, place, "a turn")


def _gsm8k(row: Mapping[str, Any], place: str) -> Turns:
    """Read a GSM8K line, whose final answer is after #### at the end of the worked solution."""
    question, worked = row["question"], row.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise UnusablePrompt(f"{place}: `question` must be a text that is not empty")
    marked = MARKED_ANSWER.search(worked) if isinstance(worked, str) else None
    if marked is None:  # a question with an answer of another kind
        return Turns([question], answer=worked)
    return Turns([question], answer=marked[1].replace(",", ""), checker="last_number", category=MATHS)


def _humaneval(row: Mapping[str, Any], place: str) -> Turns:
    """Read a HumanEval line: the beginning of a program, to be continued. Programs are not run to check them."""
    task, prompt = row["task_id"], row.get("prompt")
    if not isinstance(task, str) or not isinstance(prompt, str) or not prompt.strip():
        raise UnusablePrompt(
            f"{place}: a line of HumanEval needs the texts `task_id` and `prompt`, which must not be empty"
        )
    return Turns([prompt], category=CODE, prompt_id=task, form="continue")


def refuse_questions(row: Mapping[str, Any], place: str) -> None:
    """Raise UserError for a line of Spec-Bench or MT-Bench, which another workload reads."""
    if "turns" in row and "question_id" in row:
        raise UserError(f"{place}: a question of Spec-Bench or MT-Bench; read the file with workload=spec_bench")
