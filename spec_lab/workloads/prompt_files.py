"""Files of prompts: the shipped ones, one's own, and question files of Spec-Bench and MT-bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.json_input import is_integer
from spec_lab.corpus.example import Form
from spec_lab.errors import UserError
from spec_lab.menu.choices import Unusable
from spec_lab.menu.config import WorkloadConfig
from spec_lab.workloads.json_lines import TextLine, json_object, text_lines
from spec_lab.workloads.unusable import UnusablePrompt, keep_usable

PROMPTS_FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt set.

    Attributes:
        text: what is asked first.
        later_turns: what the user asks in the same conversation, once there is an answer.
        place: `FILE:LINE`, empty where the prompt comes from no file.
    """

    prompt_id: str
    category: str
    form: Form
    text: str
    answer: str | None
    later_turns: tuple[str, ...] = ()
    place: str = field(default="", compare=False)


def shipped_prompts() -> list[Prompt]:
    """Read the evaluation prompts that come with the package, one category after the other."""
    files = sorted(PROMPTS_FOLDER.glob("*.jsonl"))
    return [prompt for path in files for prompt in _read(path, _prompt, Unusable.refuse)]


def read_jsonl(config: WorkloadConfig) -> list[Prompt]:
    """Read own prompts: `prompt`, and optionally `id`, `category`, `form` (chat or continue), `answer`."""
    return _read(_path(config), _prompt, config.unusable)


def read_spec_bench(config: WorkloadConfig) -> list[Prompt]:
    """Read question files of Spec-Bench and MT-bench: `question_id`, `category`, `turns`; `workload.turns` are
    asked."""
    return _read(_path(config), lambda line, name: _question(line, name, config.turns), config.unusable)


def _read(path: Path, parse: Callable[[TextLine, str], Prompt], unusable: Unusable) -> list[Prompt]:
    return keep_usable(text_lines(path), lambda line: parse(line, path.stem), unusable)


def _path(config: WorkloadConfig) -> Path:
    if config.path is None:
        raise UserError(f"workload={config.name} reads a file: set workload.path=FILE.jsonl")
    return Path(config.path)


def _prompt(line: TextLine, file_name: str) -> Prompt:
    row = json_object(line)
    form, answer = row.get("form", "chat"), row.get("answer")
    category, prompt_id = row.get("category", file_name), row.get("id", f"{file_name}-{line.index:04d}")
    if not isinstance(row.get("prompt"), str) or form not in ("chat", "continue"):
        raise UnusablePrompt(f"{line.place}: a line needs a text `prompt`, and `form` chat or continue if any")
    if not _is_word(category) or not _is_word(prompt_id) or isinstance(answer, list | dict):
        raise UnusablePrompt(f"{line.place}: `id`, `category` and `answer` must be a text or a number if any")
    answer = None if answer is None else str(answer)
    return Prompt(str(prompt_id), str(category), form, row["prompt"], answer, place=line.place)


def _question(line: TextLine, file_name: str, most_turns: int | None) -> Prompt:
    question_id, category, turns = (json_object(line).get(key) for key in ("question_id", "category", "turns"))
    texts = turns if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns) else []
    if not _is_word(question_id) or not _is_word(category) or not texts:
        raise UnusablePrompt(f"{line.place}: a question needs question_id, category and turns, a list of texts")
    later_turns = tuple(texts[1:most_turns])
    return Prompt(f"{file_name}-{question_id}", str(category), "chat", texts[0], None, later_turns, line.place)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) or is_integer(value)
