"""Prompt files as people have them: `messages`, ShareGPT, GSM8K, HumanEval, and what reasoning_gym makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_lab.core.errors import UserError
from spec_lab.menu.config import WorkloadConfig
from spec_lab.workloads.prompt_files import Prompt, read_jsonl
from spec_lab.workloads.reasoning_gym import made_prompts
from tests import stand_in_gym

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
    [prompt] = read_jsonl(WorkloadConfig(name="jsonl", path=str(file), **settings))
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


def test_what_an_assistant_said_may_have_keys_of_its_own(tmp_path: Path) -> None:
    prompt = read(tmp_path, {"messages": [*CHAT[:2], CHAT[2] | {"weight": 1}]})
    assert (prompt.text, prompt.later_turns) == ("2 + 2?", ())


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


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "anwser": 1}, r"nothing reads `anwser`; did you mean answer\?"),
        ({"prompt": "x", "zzz": 1}, r"nothing reads `zzz`; a line is read for prompt, form, id"),
        ({"messages": CHAT, "prompt_": 1}, "nothing reads `prompt_`"),
        ({"Question": "x", "Answer": 1}, r"nothing reads `Question`; did you mean question\?"),
        ({"messages": []}, "must be a list of turns"),
        ({"messages": [{"role": "user"}]}, "turn 1 of `messages` needs texts"),
        ({"messages": [{"role": "usr", "content": "x"}]}, r"has the role usr; did you mean user\?"),
        ({"messages": [CHAT[1], CHAT[0]]}, "one system message, before the first turn"),
        ({"conversations": [SHARE_GPT[1]]}, "no turn of the user"),
        ({"messages": [{"role": "user", "content": "x", "wieght": 1}]}, "turn 1 .* nothing reads `wieght`"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "x"}]}, "has role, content, from; give `role`"),
        ({"conversations": SHARE_GPT, "conversation_id": [7]}, "must be a printable text"),
        *(({"prompt": "x", key: " "}, "must be a printable text") for key in ("id", "category")),
        ({"task_id": "x/1", "prompt": ""}, "`task_id` and `prompt`, which must not be empty"),
        ({"question": " ", "answer": "#### 1"}, "`question` must be a text that is not empty"),
        ({"question_id": 81, "turns": ["a"], "category": "writing"}, "workload=spec_bench"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        read(tmp_path, row)
    assert "mine.jsonl:1" in str(caught.value) and "\n" not in str(caught.value)


def test_tasks_of_reasoning_gym_have_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_gym.install(monkeypatch)
    prompts = made_prompts(["chain_sum"], 2, 5)
    assert [(prompt.prompt_id, prompt.answer) for prompt in prompts] == [
        ("chain_sum-s5-0001", "5"),
        ("chain_sum-s5-0002", "6"),
    ]
    assert prompts[0].text.startswith("5 + 0?") and "Answer:" in prompts[0].text
    with pytest.raises(UserError, match=r"no task chain_sums; did you mean chain_sum\?"):
        made_prompts(["chain_sums"], 1, 0)


def test_without_reasoning_gym_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="reasoning_gym, which is not installed; pip install"):
        made_prompts(["chain_sum"], 1, 0)
