"""Prompt files as people have them: `messages`, ShareGPT, GSM8K, HumanEval, and what reasoning_gym makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_lab.workloads.prompt_files import Prompt, read_jsonl
from spec_lab.workloads.reasoning_gym import made_prompts
from tests import stand_in_gym
from tests.lab import part

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
]
SHARE_GPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Bye"}]


def read(folder: Path, row: dict[str, Any], **settings: Any) -> Prompt:
    file = folder / "mine.jsonl"
    file.write_text(json.dumps(row))
    [prompt] = read_jsonl(part("workload", "jsonl", path=str(file), **settings))
    return prompt


def test_messages_are_asked_turn_by_turn(tmp_path: Path) -> None:
    prompt = read(tmp_path, {"messages": CHAT, "id": "one", "answer": 6})
    assert (prompt.text, prompt.later_turns, prompt.system) == ("2 + 2?", ("And 3 + 3?",), "Be brief.")
    assert (prompt.prompt_id, prompt.answer, prompt.form) == ("one", "6", "chat")
    assert read(tmp_path, {"messages": CHAT}, turns=1).later_turns == ()


def test_a_conversation_of_sharegpt_is_the_same(tmp_path: Path) -> None:
    prompt = read(tmp_path, {"id": "x_0", "conversations": SHARE_GPT})
    assert (prompt.prompt_id, prompt.text, prompt.later_turns) == ("x_0", "Hi", ("Bye",))
    assert read(tmp_path, {"conversation_id": 7, "conversations": SHARE_GPT}).prompt_id == "7"


def test_gsm8k_has_its_answer_behind_four_signs(tmp_path: Path) -> None:
    prompt = read(tmp_path, {"question": "How many?", "answer": "First 2 * 600 = <<2*600=1200>>1200.\n#### 1,200"})
    assert (prompt.text, prompt.answer, prompt.checker, prompt.category) == (
        "How many?",
        "1200",
        "last_number",
        "gsm8k",
    )


def test_a_task_of_humaneval_is_continued_and_not_checked(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "", "canonical_solution": ""}
    prompt = read(tmp_path, row)
    assert (prompt.prompt_id, prompt.form, prompt.answer, prompt.text) == (
        "HumanEval/0",
        "continue",
        None,
        "def f():\n",
    )


def test_tasks_of_reasoning_gym_have_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_gym.install(monkeypatch)
    prompts = made_prompts(["chain_sum"], 2, 5)
    assert [(prompt.prompt_id, prompt.answer) for prompt in prompts] == [
        ("chain_sum-s5-0001", "5"),
        ("chain_sum-s5-0002", "6"),
    ]
    assert prompts[0].text.startswith("5 + 0?") and "Answer:" in prompts[0].text
