"""Prompts that the target writes itself: it continues the start of a user's turn in its chat template."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason, Request
from spec_lab.train.texts.chat import ChatForm
from spec_lab.train.texts.prompts import Conversation, Seen
from spec_lab.workloads.conversations import before_end

OPENINGS = Path(__file__).with_name("openings.tsv")
FEWEST_WORDS = 3
MOST_FOLLOW_UP_TOKENS = 80
BROKEN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""The result of decoding tokens that are not a whole character, such as the last ones of a truncated turn."""
END_OF_SENTENCE = re.compile(r"[.?!:;\n][\"')\]]*(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a user's turn: its kind, the most tokens that the target may add, and its first words, if
    any."""

    kind: str
    max_tokens: int
    words: str


@cache
def openings() -> tuple[Opening, ...]:
    """Read the shipped openings."""
    lines = (line.split("\t") for line in OPENINGS.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return tuple(Opening(kind, int(most), words.strip()) for kind, most, words in lines)


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """A user's turn for the target to complete. The last turn of `conversation` holds its first words, if any."""

    conversation: Conversation
    request: Request


def begin_prompts(form: ChatForm, first: int, number: int, seed: int, max_prompt_tokens: int) -> list[BegunTurn]:
    """Begin `number` prompts, numbered from `first` on. A prompt's opening depends only on `seed` and its number.

    Prompts whose opening leaves no room are left out.
    """
    begin = form.next_turn(())
    chosen = [random.Random(f"{seed}-{index}").choice(openings()) for index in range(first, first + number)]
    ids = form.tokenizer.encode_batch([begin + opening.words for opening in chosen])
    # The template's tokens after the turn must fit too.
    room = max_prompt_tokens - len(form.tokenizer.encode(form.parts(1)[-1]))
    begun = []
    for index, opening, prompt_ids in zip(range(first, first + number), chosen, ids, strict=True):
        conversation = Conversation(f"own-{index:07d}", opening.kind, (opening.words,))
        most = min(opening.max_tokens, room - len(prompt_ids))
        if most > 0:
            begun.append(BegunTurn(conversation, Request(f"prompt-{index}", "", tuple(prompt_ids), most)))
    return begun


def begin_follow_ups(form: ChatForm, answered: Sequence[Conversation], max_prompt_tokens: int) -> list[BegunTurn]:
    """Begin the user's next turn in conversations that end with the assistant's turn, if there is room."""
    ids = form.tokenizer.encode_batch([form.next_turn(each.turns, each.system) for each in answered])
    behind = len(form.tokenizer.encode(form.parts(1)[-1]))
    begun = []
    for conversation, prompt_ids in zip(answered, ids, strict=True):
        room = min(MOST_FOLLOW_UP_TOKENS, max_prompt_tokens - behind - len(prompt_ids))
        if room > 0:
            request = Request(f"{conversation.prompt_id}-next", "", tuple(prompt_ids), room)
            begun.append(BegunTurn(replace(conversation, turns=(*conversation.turns, "")), request))
    return begun


def end_turns(
    form: ChatForm, begun: Sequence[BegunTurn], records: Iterable[RequestRecord], eos: frozenset[int], seen: Seen
) -> tuple[list[Conversation], Counter[str]]:
    """Return the conversations with the completed turns, and counts: asked, trimmed, kept, and left out by reason.

    A turn that did not end is cut to its `whole_sentences`.
    """
    kept: list[Conversation] = []
    counts = Counter(asked=len(begun))
    mark = form.end_of_turn()
    for turn, record in zip(begun, records, strict=True):
        before = turn.conversation.turns[-1]
        written, end, _ = form.tokenizer.decode(before_end(record.output_ids, eos)).partition(mark)
        said = before + written.replace(BROKEN_CHARACTER, "")
        if record.finish_reason is not FinishReason.EOS and not end:
            said = whole_sentences(said)
            counts["trimmed"] += 1
        conversation = replace(turn.conversation, turns=(*turn.conversation.turns[:-1], said.strip()))
        if not written.strip() or len(" ".join(conversation.turns).split()) < FEWEST_WORDS:
            counts["empty"] += 1
        elif not seen.is_new(conversation):
            counts["duplicate"] += 1
        else:
            counts["kept"] += 1
            kept.append(conversation)
    return kept, counts


def whole_sentences(text: str) -> str:
    """Return a text without its last sentence if that is unfinished; all of it if no sentence ends."""
    ends = [found.end() for found in END_OF_SENTENCE.finditer(text)]
    return text[: ends[-1]] if ends else text
