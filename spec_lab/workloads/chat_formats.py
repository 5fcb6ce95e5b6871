"""Reads common formats of prompt files: chats in `messages` or ShareGPT's `conversations`, GSM8K's and HumanEval's.

From a chat the user's turns and the system prompt are used. The assistant's turns are left out, since the answers in a
conversation are plain decoding's, as in every workload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.workloads.pocket_form import Form

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
TOLD = ("answer", "checker", "system", "num_draft_tokens", "max_new_tokens", "stop", "stop_token_ids")
SHARED_KEYS = ("id", "category", *TOLD)
"""Keys that a line of any format may have."""
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations", "conversation_id"),
    "task_id": ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
    "question": ("question",),
    "prompt": ("prompt", "form"),
}
"""The key by which a format is recognised, with all keys of that format. HumanEval has `prompt` too."""
FORMS: Mapping[str, Form] = {"chat": "chat", "continue": "continue"}
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


def turns_of(row: Mapping[str, Any], place: str) -> Turns:
    """Return the contents of a line in any of the formats.

    Raises:
        UserError: it has what nothing reads, since a misspelt `answer` would otherwise be ignored silently.
    """
    kind = next((kind for kind in FORMATS if kind in row), "prompt")
    unread = row.keys() - {*FORMATS[kind], *SHARED_KEYS}
    said = _said(row[kind]) if kind in ("messages", "conversations") else []
    if any(role == "system" for role, _ in said[1:]):
        unread = {*unread, "a later turn of the system"}
    if not isinstance(row.get("answer"), str | int | float | None):
        unread = {*unread, "an answer that is no text or number"}
    if unread:
        known = ", ".join((*FORMATS[kind], *SHARED_KEYS))
        raise UserError(f"{place}: nothing reads {', '.join(sorted(unread))}; a line with `{kind}` has {known}")
    if said:
        system = next((text for role, text in said if role == "system"), None)
        return Turns([text for role, text in said if role == "user"], system, prompt_id=row.get("conversation_id"))
    if kind == "question":
        return _gsm8k(row["question"], row.get("answer"))
    if kind == "task_id":  # programs are not run to check them
        return Turns([row["prompt"]], category=CODE, prompt_id=row["task_id"], form="continue")
    return Turns([row["prompt"]], form=FORMS[row.get("form", "chat")])


def _said(messages: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return the role and the text of each turn."""
    return [
        (ROLES[turn["role"]], turn["content"]) if "role" in turn else (ROLES[turn["from"]], turn["value"])
        for turn in messages
    ]


def _gsm8k(question: str, worked: Any) -> Turns:
    """Read a GSM8K line, whose final answer is after #### at the end of the worked solution."""
    marked = MARKED_ANSWER.search(worked) if isinstance(worked, str) else None
    if marked is None:  # a question with an answer of another kind
        return Turns([question], answer=worked)
    return Turns([question], answer=marked[1].replace(",", ""), checker="last_number", category=MATHS)
