"""Prompt files: what is read, what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import compose
from spec_lab.config.choices import Unusable
from spec_lab.core.errors import UserError
from spec_lab.options.workloads import Jsonl, SpecBench
from spec_lab.workloads.prompt_files import Prompt, read_jsonl, read_spec_bench


def read(path: Path, workload: str = "jsonl", **options: Any) -> list[Prompt]:
    if workload == "jsonl":
        return read_jsonl(Jsonl(path=str(path), **options))
    return read_spec_bench(SpecBench(path=str(path), **options))


def test_a_line_needs_only_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "Hi"}\n\n{"prompt": "Go", "id": "x", "category": "c", "form": "continue", "answer": 4}\n'
    )
    assert read(path) == [Prompt("mine-0000", "mine", "chat", "Hi", None), Prompt("x", "c", "continue", "Go", "4")]


def test_a_chat_is_told_what_its_line_says_else_what_the_workload_says(tmp_path: Path) -> None:
    """A text to continue is told nothing, and a later turn what the first one was."""
    asked: list[tuple[str, str | None]] = []

    class Told:
        def encode_prompt(self, form: str, prompt: str, system: str | None = None) -> list[int]:
            asked.append((prompt, system))
            return [1]

    own = tmp_path / "mine.jsonl"
    own.write_text('{"prompt": "a", "system": "own"}\n{"prompt": "b"}\n{"prompt": "c", "form": "continue"}\n')
    bench = tmp_path / "bench.jsonl"
    bench.write_text('{"question_id": 1, "category": "qa", "turns": ["d", "e"]}')
    tokenizer: Any = Told()
    config = compose(["workload=jsonl", f"workload.path={own}", "workload.system=all"]).config
    assert [request.system for request in config.workload.load(config, tokenizer)] == ["own", "all", None]
    config = compose(["workload=spec_bench", f"workload.path={bench}", "workload.system=all"]).config
    assert [request.system for request in config.workload.load(config, tokenizer)] == ["all"]
    assert asked == [("a", "own"), ("b", "all"), ("c", None), ("d", "all")]


def test_a_line_may_hold_separators_that_are_no_line_feed_and_a_file_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two\x85"}\r\n', encoding="utf-8", newline="")
    assert [prompt.text for prompt in read(path)] == ["one\u2028two\x85"]


GOOD = {"jsonl": '{"prompt": "a"}', "spec_bench": '{"question_id": 1, "category": "qa", "turns": ["a"]}'}


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "a", "anwser": 1},
        {"promt": "a"},
        {"messages": [{"role": "user", "content": "a"}], "prompt": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        {"prompt": "a", "answer": ["b"]},
        {"question_id": 81, "turns": ["a"], "category": "writing"},
    ],
)
def test_what_nothing_reads_is_refused(line: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{GOOD['jsonl']}\n\n{json.dumps(line)}\n")
    with pytest.raises(UserError, match=r"mine\.jsonl:3: nothing reads"):
        read(path)


@pytest.mark.parametrize("workload", ["jsonl", "spec_bench"])
@pytest.mark.parametrize("broken", ["nonsense", "[1]", "{}", '{"messages": [{"role": "usr", "content": "x"}]}'])
def test_a_broken_line_is_skipped_where_that_is_asked(
    workload: str, broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join([GOOD[workload], broken, GOOD[workload]]))
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        read(path, workload)
    assert [prompt.text for prompt in read(path, workload, unusable=Unusable.skip)] == ["a", "a"]
    assert "mine.jsonl:2" in capsys.readouterr().err


def test_so_many_turns_of_a_question_are_read_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question_id": 1, "category": "qa", "turns": ["a", "b", "c"]}')
    asked = {turns: read(path, "spec_bench", turns=turns)[0] for turns in (None, 1, 2)}
    assert {prompt.text for prompt in asked.values()} == {"a"}
    assert {turns: prompt.later_turns for turns, prompt in asked.items()} == {None: ("b", "c"), 1: (), 2: ("b",)}
