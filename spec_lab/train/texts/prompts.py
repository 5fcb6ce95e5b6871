"""Conversations that need an answer: reads them from files, generates them, and finds duplicates."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.train.texts.settings import TextsConfig
from spec_lab.workloads.chat_formats import ROLES
from spec_lab.workloads.json_lines import TextLine, text_lines
from spec_lab.workloads.reasoning_gym import made_questions

GENERATED = "reasoning_gym:"
"""The prefix of entries of `prompts` that the package reasoning_gym (Apache-2.0) generates; others are files."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to the target's answer.

    Attributes:
        turns: alternating turns of user and assistant, from the user's first on.
        later_turns: the user's turns after the answer, if a file has them.
        system: the system message; None leaves it to the chat template.
    """

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    later_turns: tuple[str, ...] = ()
    system: str | None = None

    def as_line(self) -> str:
        """Return the line of JSON that `from_line` reads back."""
        told = [] if self.system is None else [_message("system", self.system)]
        said = [_message("assistant" if place % 2 else "user", turn) for place, turn in enumerate(self.turns)]
        line = {"id": self.prompt_id, "category": self.category, "messages": [*told, *said]}
        return json.dumps(line | ({"later_turns": self.later_turns} if self.later_turns else {}), ensure_ascii=False)

    @classmethod
    def from_line(cls, text: str) -> Conversation:
        """Read a line that `as_line` made."""
        line = json.loads(text)
        told = [message["content"] for message in line["messages"] if message["role"] == "system"]
        said = tuple(message["content"] for message in line["messages"] if message["role"] != "system")
        return cls(line["id"], line["category"], said, tuple(line.get("later_turns", ())), told[0] if told else None)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


OTHERS = "give lines with a user's turn in `messages`, `conversations` or `prompt`"


class Seen:
    """Finds prompts that occurred before, ignoring case, whitespace and punctuation."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def is_new(self, conversation: Conversation) -> bool:
        """Return whether the prompt is new, and remember it."""
        words = re.findall(r"\w+", " ".join(conversation.turns).lower())
        digest = blake2b(" ".join(words).encode(), digest_size=8).digest()
        before = len(self._digests)
        self._digests.add(digest)
        return len(self._digests) > before


def read_prompts(sources: Iterable[str], seed: int, allow_tests: bool) -> tuple[list[Conversation], Counter[str]]:
    """Read the prompts of JSON Lines files, or generate them for `reasoning_gym:TASK:COUNT`. Also return counts of the
    lines left out, by reason.

    A line has `messages` (role and content), `conversations` (from and value, as in ShareGPT), a `prompt`, or with
    `allow_tests` also `turns`. Of a conversation, only the system message and the user's turns are used; the target
    writes the assistant's.

    Raises:
        UserError: no such file or task, or a file of questions that are for testing.
    """
    kept: list[Conversation] = []
    counts: Counter[str] = Counter()
    for source in sources:
        if source.startswith(GENERATED):
            kept += generated_prompts(source, seed)
            continue
        for line in text_lines(Path(source)):
            try:
                row = json.loads(line.text)
            except ValueError:
                counts["broken"] += 1
                continue
            if "turns" in row and not allow_tests:
                raise UserError(
                    f"{source}: these are questions of Spec-Bench or MT-bench, which are for testing; take other "
                    "prompts, or test_prompts=true for texts that no published drafter learns on "
                    "(writing.test_prompts=true, where the same command trains)"
                )
            conversation = _conversation(row, line, Path(source).stem)
            counts["without_a_user"] += conversation is None
            kept += [] if conversation is None else [conversation]
    return named_apart(kept), counts


def as_many_as_prompts(config: TextsConfig) -> TextsConfig:
    """Return the settings with `num_texts` limited to the different prompts, of any length, and their second turns.

    Raises:
        UserError: a file cannot be read or is for testing, or there is no prompt.
    """
    if not config.prompts:
        return config
    seen = Seen()
    found, counts = read_prompts(config.prompts, config.seed, config.test_prompts)
    kept = [conversation for conversation in found if seen.is_new(conversation)]
    if not kept:
        raise UserError(
            f"prompts: none is left ({in_words(counts)}); give lines with messages, conversations or prompt"
        )
    num_second = round(config.num_texts * config.second_turns)
    first = kept[: config.num_texts - num_second]
    going_on = sum(bool(conversation.later_turns) for conversation in first)
    return replace(config, num_texts=len(first) + min(num_second, going_on))


def in_words(counts: Counter[str]) -> str:
    """Describe what became of prompts, by their counts."""
    why = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count and name != "tokens"]
    return ", ".join(why) or "there were none"


def named_apart(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Return conversations with unique ids, since every file counts from 0."""
    taken: Counter[str] = Counter()
    named = []
    for conversation in conversations:
        own, prompt_id = conversation.prompt_id, conversation.prompt_id
        while prompt_id in taken:
            taken[own] += 1
            prompt_id = f"{own}-{taken[own]}"
        taken[prompt_id] += 1
        named.append(replace(conversation, prompt_id=prompt_id))
    return named


def generated_prompts(source: str, seed: int) -> list[Conversation]:
    """Return the questions of `reasoning_gym:TASK:COUNT`.

    Raises:
        UserError: see `task_and_count`.
    """
    task, count = task_and_count(source)
    questions = made_questions(task, count, seed)
    return [Conversation(f"{task}-{place:06d}", task, (question,)) for place, (question, _) in enumerate(questions)]


def refuse_missing(sources: Iterable[str]) -> None:
    """Raise UserError if one of the `prompts` is neither a file nor a generator."""
    for source in sources:
        if source.startswith(GENERATED):
            task_and_count(source)
        elif not Path(source).is_file():
            raise UserError(
                f"prompts: there is no file {source}; give JSON Lines with messages, conversations or prompt"
            )


def task_and_count(source: str) -> tuple[str, int]:
    """Read `reasoning_gym:TASK:COUNT`; COUNT defaults to 1000.

    Raises:
        UserError: it is written in another way.
    """
    found = re.fullmatch(GENERATED + r"([^:]+)(?::0*([1-9]\d{0,7}))?", source, re.ASCII)
    if found is None:
        raise UserError(f"prompts: {source}: write {GENERATED}TASK:COUNT, where COUNT is 1 or more")
    return found[1], int(found[2] or 1000)


def _conversation(row: Mapping[str, Any], line: TextLine, stem: str) -> Conversation | None:
    """Return a line's conversation; None if it has no user's turn, as in a text to be continued."""
    if row.get("form") == "continue":
        return None
    if isinstance(row.get("prompt"), str):
        said = [("user", row["prompt"])]
    else:
        said = list(_said(row.get("messages") or row.get("conversations") or row.get("turns") or ()))
    told = [text for role, text in [("system", row.get("system")), *said] if role == "system" and isinstance(text, str)]
    asked = [text for role, text in said if role == "user" and text.strip()]
    if not asked:
        return None
    prompt_id = str(row.get("id", f"{stem}-{line.index:06d}"))
    first = Conversation(prompt_id, str(row.get("category", stem)), (asked[0],), tuple(asked[1:]))
    return replace(first, system=told[0]) if told else first


def _said(messages: Any) -> Iterator[tuple[str, str]]:
    """Yield speaker and words of each message; messages of another form are skipped."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, str):
            yield "user", message
        elif isinstance(message, dict):
            role = ROLES.get(str(message.get("role", message.get("from"))))
            text = message.get("content", message.get("value"))
            if role is not None and isinstance(text, str):
                yield role, text
