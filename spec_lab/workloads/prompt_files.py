"""Files of prompts: the shipped ones, the user's own, and question files of Spec-Bench and MT-bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.config.choices import Unusable
from spec_lab.config.groups import MAX_DRAFT_TOKENS
from spec_lab.workloads.chat_formats import turns_of
from spec_lab.workloads.json_lines import TextLine, text_lines
from spec_lab.workloads.pocket_form import Form
from spec_lab.workloads.unusable import BROKEN, keep_usable

if TYPE_CHECKING:
    from spec_lab.options.workloads import Jsonl

NUM_DRAFTS = range(MAX_DRAFT_TOKENS + 1)
PROMPTS_FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a workload.

    Attributes:
        text: the first turn.
        later_turns: the user's later turns in the same conversation.
        checker: the checker that reads the answer; None means the workload's.
        system: the system prompt of a chat; None if it has none of its own.
        num_draft_tokens: the largest number of drafts in its rounds, 0 for "off"; None means the run's.
        max_new_tokens: the longest output, in tokens; None means the run's.
        stop: texts that end its output, and `stop_token_ids` the tokens; None means the run's.
        place: `FILE:LINE`, empty if the prompt does not come from a file.
    """

    prompt_id: str
    category: str
    form: Form
    text: str
    answer: str | None
    later_turns: tuple[str, ...] = ()
    checker: str | None = None
    system: str | None = None
    num_draft_tokens: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    place: str = field(default="", compare=False)


def shipped_prompts() -> list[Prompt]:
    """Read the evaluation prompts that come with the package, one category after the other."""
    files = sorted(PROMPTS_FOLDER.glob("*.jsonl"))
    return [prompt for path in files for prompt in _read(path, _prompt, Unusable.refuse)]


def read_jsonl(config: Jsonl) -> list[Prompt]:
    """Read the user's prompts, one in each line, in any of `chat_formats.FORMATS`; the first `workload.turns` turns of
    a conversation are used."""
    prompts = _read(Path(str(config.path)), _prompt, config.unusable)
    most_later = None if config.turns is None else config.turns - 1
    return [replace(prompt, later_turns=prompt.later_turns[:most_later]) for prompt in prompts]


def read_spec_bench(config: Jsonl) -> list[Prompt]:
    """Read question files of Spec-Bench and MT-bench, which have `question_id`, `category` and `turns`. The first
    `workload.turns` turns are used."""
    return _read(Path(str(config.path)), lambda line, name: _question(line, name, config.turns), config.unusable)


def _read(path: Path, parse: Callable[[TextLine, str], Prompt], unusable: Unusable) -> list[Prompt]:
    def prompt(line: TextLine) -> Prompt:
        try:
            return parse(line, path.stem)
        except BROKEN as error:
            error.add_note(f"in {line.place}")
            raise

    return keep_usable(text_lines(path), prompt, unusable)


def _prompt(line: TextLine, file_name: str) -> Prompt:
    """Read a line in any of the formats."""
    row = json.loads(line.text)
    asked = turns_of(row, line.place)
    answer = row.get("answer") if asked.answer is None else asked.answer
    wanted, stop, stop_ids = row.get("num_draft_tokens"), row.get("stop"), row.get("stop_token_ids")
    return Prompt(
        prompt_id=str(row.get("id", asked.prompt_id or f"{file_name}-{line.index:04d}")),
        category=str(row.get("category", asked.category or file_name)),
        form=asked.form,
        text=asked.turns[0],
        answer=None if answer is None else str(answer),
        later_turns=tuple(asked.turns[1:]),
        checker=row.get("checker", asked.checker),
        system=row.get("system", asked.system),
        num_draft_tokens=None if wanted is None else (0 if wanted == "off" else NUM_DRAFTS.index(wanted)),
        max_new_tokens=row.get("max_new_tokens"),
        stop=None if stop is None else ((stop,) if isinstance(stop, str) else tuple(stop)),
        stop_token_ids=None if stop_ids is None else tuple(map(int, stop_ids)),
        place=line.place,
    )


def _question(line: TextLine, file_name: str, most_turns: int | None) -> Prompt:
    row = json.loads(line.text)
    first, *later = row["turns"][:most_turns]
    prompt_id = f"{file_name}-{row['question_id']}"
    return Prompt(
        prompt_id, str(row["category"]), "chat", first, answer=None, later_turns=tuple(later), place=line.place
    )
