"""Prompt files: what is read, what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab.cli.compose import compose_run
from spec_lab.errors import UserError
from spec_lab.workloads.load import PROMPTS_FOLDER, Prompt, read_jsonl, read_spec_bench, shipped_prompts


def read(path: Path, workload: str = "jsonl") -> list[Prompt]:
    config = compose_run([f"workload={workload}", f"workload.path={path}"])[0].workload
    return {"jsonl": read_jsonl, "spec_bench": read_spec_bench}[workload](config)


def test_a_line_needs_only_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "Hi"}\n\n{"prompt": "Go", "id": "x", "category": "c", "form": "continue", "answer": 4}\n'
    )
    assert read(path) == [Prompt("mine-0000", "mine", "chat", "Hi", None), Prompt("x", "c", "continue", "Go", "4")]


def test_a_line_may_hold_separators_that_are_no_line_feed_and_a_file_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two\x85"}\r\n', encoding="utf-8", newline="")
    assert [prompt.text for prompt in read(path)] == ["one\u2028two\x85"]


def test_a_file_that_is_not_utf8_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes('{"prompt": "Käse"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"mine\.jsonl is not UTF-8 \(byte 14: .*save it as UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("workload", "content", "message"),
    [
        ("jsonl", '{"prompt": "a"}\nnonsense\n', r"mine\.jsonl:2 is not JSON"),
        ("jsonl", "[1]\n", r"mine\.jsonl:1 is not a JSON object"),
        ("jsonl", '{"text": "a"}\n', "a line needs a text `prompt`"),
        ("jsonl", '{"prompt": "a", "form": "song"}\n', "`form` chat or continue"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": []}\n', "a question needs"),
        ("spec_bench", '{"question_id": 1, "turns": ["a"]}\n', "a question needs question_id, category"),
    ],
)
def test_a_broken_line_is_refused_with_its_file(workload: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read(path, workload)


def test_the_shipped_prompts_come_one_category_after_the_other() -> None:
    categories = list(dict.fromkeys(prompt.category for prompt in shipped_prompts()))
    assert categories == sorted(path.stem for path in PROMPTS_FOLDER.glob("*.jsonl"))
