"""Prompts that a target writes itself: it continues the start of a user's turn, and the next run asks its outputs.

`workload=user_turns` begins the turns, `workload=outputs` asks what another run answered. So a model needs no prompts
of others for the texts that a head for it is trained on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.core.errors import UserError
from spec_lab.core.types import FinishReason, Request
from spec_lab.record.reading import read_requests, read_run
from spec_lab.workloads.prompt_files import Prompt
from spec_lab.workloads.tokenizer import Tokenizer

if TYPE_CHECKING:
    from spec_lab.config.run import Run
    from spec_lab.options.workloads import UserTurns

OPENINGS = Path(__file__).with_name("openings.tsv")
MARK = "QZXJ"
"""A text that stands for a user's turn while the template's own texts around it are looked for."""
FEWEST_WORDS = 3
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
    lines = OPENINGS.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return tuple(Opening(kind, int(most), words.strip()) for kind, most, words in rows)


def around_a_turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return what the chat template writes before a user's first turn, and the first line that it writes after it.

    Raises:
        UserError: the template has no such turn.
    """
    before, found, after = tokenizer.decode(tokenizer.encode_conversation([MARK])).partition(MARK)
    end = after.strip().partition("\n")[0].strip()
    if not found or not end:
        raise UserError("workload=user_turns: the target has no chat template with a user's turn; take workload=jsonl")
    return before, end


def user_turn_requests(workload: UserTurns, run: Run, tokenizer: Tokenizer) -> list[Request]:
    """Begin `workload.num_requests` user's turns, or `workload.limit` if that is fewer.

    The opening of a turn depends only on the seed and its number.
    """
    before, _ = around_a_turn(tokenizer)
    requests = []
    for number in range(min(workload.num_requests, workload.limit or workload.num_requests)):
        opening = random.Random(f"{run.seed}-{number}").choice(openings())
        most = min(opening.max_tokens, run.max_new_tokens)
        ids = tuple(tokenizer.encode(before + opening.words))
        requests.append(Request(f"own-{number:07d}", opening.kind, ids, most))
    return requests


def outputs_of(folder: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the outputs of a run as prompts, without those that only repeat others.

    Outputs of `workload=user_turns` are completed by the words that they were begun with, and end where the turn does.
    One that ran into its limit loses its last, unfinished sentence.
    """
    is_begun = read_run(folder).config["workload"]["name"] == "user_turns"
    before, end = around_a_turn(tokenizer) if is_begun else ("", "")
    prompts, seen = [], set()
    for request in read_requests(folder):
        has_ended = request.finish_reason == FinishReason.EOS
        text = tokenizer.decode(request.output_ids[: -1 if has_ended else None]).replace(BROKEN_CHARACTER, "")
        if is_begun:
            text, found, _ = text.partition(end)
            text = tokenizer.decode(request.prompt_ids).removeprefix(before) + text
            text = (text if has_ended or found else whole_sentences(text)).strip()
        words = re.findall(r"\w+", text.lower())
        key = " ".join(words)
        if len(words) >= FEWEST_WORDS and key not in seen:
            seen.add(key)
            prompts.append(Prompt(request.id, request.category, "chat", text, answer=None))
    return prompts


def whole_sentences(text: str) -> str:
    """Return a text without its last sentence if that is unfinished; all of it if no sentence ends."""
    ends = [found.end() for found in END_OF_SENTENCE.finditer(text)]
    return text[: ends[-1]] if ends else text
