"""Files of prompts: the shipped ones, the user's own, and question files of Spec-Bench and MT-bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.json_input import is_integer
from spec_lab.core.errors import UserError
from spec_lab.menu.choices import Unusable
from spec_lab.menu.config import WorkloadConfig
from spec_lab.menu.offers import MAX_DRAFT_TOKENS
from spec_lab.workloads.chat_formats import TOLD, Turns, refuse_questions, refuse_unknown, turns_of
from spec_lab.workloads.json_lines import TextLine, json_object, text_lines
from spec_lab.workloads.pocket_form import Form
from spec_lab.workloads.unusable import UnusablePrompt, keep_usable

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
    place: str = field(default="", compare=False)


def shipped_prompts() -> list[Prompt]:
    """Read the evaluation prompts that come with the package, one category after the other."""
    files = sorted(PROMPTS_FOLDER.glob("*.jsonl"))
    return [prompt for path in files for prompt in _read(path, _prompt, Unusable.refuse)]


def read_jsonl(config: WorkloadConfig) -> list[Prompt]:
    """Read the user's prompts, one in each line, in any of `chat_formats.FORMATS`; the first `workload.turns` turns of
    a conversation are used."""
    prompts = _read(_path(config), _prompt, config.unusable)
    return [replace(prompt, later_turns=prompt.later_turns[: _later(config.turns)]) for prompt in prompts]


def _later(most_turns: int | None) -> int | None:
    return None if most_turns is None else most_turns - 1


def read_spec_bench(config: WorkloadConfig) -> list[Prompt]:
    """Read question files of Spec-Bench and MT-bench, which have `question_id`, `category` and `turns`. The first
    `workload.turns` turns are used."""
    return _read(_path(config), lambda line, name: _question(line, name, config.turns), config.unusable)


def _read(path: Path, parse: Callable[[TextLine, str], Prompt], unusable: Unusable) -> list[Prompt]:
    return keep_usable(text_lines(path), lambda line: parse(line, path.stem), unusable)


def _path(config: WorkloadConfig) -> Path:
    if config.path is None:
        raise UserError(f"workload={config.name} reads a file: set workload.path=FILE.jsonl")
    return Path(config.path)


def _prompt(line: TextLine, file_name: str) -> Prompt:
    """Read a line in any of the formats.

    Raises:
        UnusablePrompt: the line is broken, or has a key that nothing reads.
    """
    row = json_object(line)
    refuse_questions(row, line.place)
    refuse_unknown(row, line.place)
    asked = turns_of(row, line.place) or _alone(row, line.place)
    answer = row.get("answer") if asked.answer is None else asked.answer
    category = row.get("category", asked.category or file_name)
    prompt_id = row.get("id", asked.prompt_id or f"{file_name}-{line.index:04d}")
    if not _is_word(category) or not _is_word(prompt_id) or not _is_answer(answer):
        raise UnusablePrompt(
            f"{line.place}: `id`, `category` and `answer` must be a printable text that is not empty, or a "
            "number, if given"
        )
    checker = row.get("checker", asked.checker)
    if checker is not None and (not isinstance(checker, str) or not checker.isidentifier()):
        raise UnusablePrompt(f"{line.place}: `checker` must be a value of workload.checker, such as last_number")
    system = row.get("system", asked.system)
    if system is not None and (not isinstance(system, str) or asked.form != "chat"):
        raise UnusablePrompt(f"{line.place}: `system` must be a text, and belongs to a chat")
    return Prompt(
        str(prompt_id),
        str(category),
        asked.form,
        asked.turns[0],
        None if answer is None else str(answer),
        tuple(asked.turns[1:]),
        checker=checker,
        system=system,
        num_draft_tokens=_draft_tokens(row.get("num_draft_tokens"), line.place),
        place=line.place,
    )


def _alone(row: Mapping[str, Any], place: str) -> Turns:
    """Read a line with a `prompt`."""
    form = row.get("form", "chat")
    if not isinstance(row.get("prompt"), str) or form not in ("chat", "continue"):
        raise UnusablePrompt(f"{place}: a line needs a text `prompt`; `form` must be chat or continue if given")
    if form == "chat" and not row["prompt"].strip():
        raise UnusablePrompt(f"{place}: the `prompt` of a chat must not be empty")
    return Turns([row["prompt"]], form=form)


def _draft_tokens(value: Any, place: str) -> int | None:
    if value is None or (is_integer(value) and 0 <= value <= MAX_DRAFT_TOKENS):
        return None if value is None else int(value)
    if value == "off":
        return 0
    raise UnusablePrompt(f'{place}: `num_draft_tokens` must be a number from 0 to {MAX_DRAFT_TOKENS} or "off" if given')


def _question(line: TextLine, file_name: str, most_turns: int | None) -> Prompt:
    row = json_object(line)
    question_id, category, turns = (row.get(key) for key in ("question_id", "category", "turns"))
    texts = turns if isinstance(turns, list) and all(isinstance(turn, str) and turn.strip() for turn in turns) else []
    if not _is_word(question_id) or not _is_word(category) or not texts:
        raise UnusablePrompt(
            f"{line.place}: a question needs question_id, category and turns, a list of texts that say something; the "
            "first two must be printable"
        )
    if unread := [key for key in TOLD if key in row]:
        raise UnusablePrompt(
            f"{line.place}: `{unread[0]}` of a question is not read; workload=jsonl reads it in `messages`"
        )
    later_turns = tuple(texts[1:most_turns])
    return Prompt(f"{file_name}-{question_id}", str(category), "chat", texts[0], None, later_turns, place=line.place)


def _is_word(value: Any) -> bool:
    return (isinstance(value, str) and value.isprintable() and bool(value.strip())) or is_integer(value)


def _is_answer(value: Any) -> bool:
    return value is None or isinstance(value, str) or is_integer(value) or (type(value) is float and isfinite(value))
