"""The answer checker, on the texts that a model really leaves behind."""

from __future__ import annotations

import pytest

from spec_lab.corpus.example import Example, render_example, render_prompt
from spec_lab.workloads.checker import extract_answer, is_correct


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\n6 and 7\n</think>\nAnswer: 42<|end|>", "42"),
        ("<think>\n6 and 7\n</think>\nAnswer:   42. \nand so on", "42"),
        ("<think>\n\n</think>\nAnswer: 41\nAnswer: 42", "42"),
        ("<think>a</think>\nAnswer: 41\n<think>b</think>\nAnswer: 42", "42"),
        ("<think>\n</think>\nAnswer: Monday,  22 May<|end|>", "monday, 22 may"),
        ("<think>\nit is 42. Answer: 42", None),  # cut off inside the thinking
        ("Answer: 42", None),
        ("<think>a</think>\nAnswer: 41\n<think>b</think>\n", None),  # an earlier turn's answer is not this one's
        ("<think>\nAnswer: 42\n</think>\n42<|end|>", None),  # the only marker is in the thinking
        ("<think>\n42\n</think>\nAnswer:", None),  # cut off before the answer
        ("<think>\n42\n</think>\nAnswer:\n42", None),
        ("<|channel>thought\n6 and 7\n<channel|>Answer: 42<turn|>", "42"),
        ("<|channel>thought\nAnswer: 42", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 times 7 is 42.\nAnswer: 42", "42"),
        ("42", None),
        ("Answer: 41\nAnswer: 42.", "42"),
        ("<think>\nAnswer: 41\n</think>\nAnswer: 42", "42"),
    ],
)
def test_a_model_without_markers_answers_in_all_that_it_says(text: str, answer: str | None) -> None:
    assert extract_answer(text, thinks=False) == answer


def test_is_correct_ignores_spelling_only() -> None:
    text = "<think>\nx\n</think>\nAnswer: Monday, 22 May<|end|>"
    assert is_correct("Monday, 22 May", text)
    assert is_correct("monday,  22 may.", text)
    assert not is_correct("Monday, 2 May", text)
    assert not is_correct("4", "<think>\nx\n</think>\nAnswer: 42")
    assert not is_correct("42", "<think>\nAnswer: 42")


def test_rendered_chat_begins_with_its_prompt_and_checks() -> None:
    example = Example("arithmetic", "chat", "6 times 7?", "that is 42.", "Answer: 42")
    rendered, prompt = render_example(example), render_prompt("chat", "6 times 7?")
    assert prompt == "<|user|>\n6 times 7?<|end|>\n<|assistant|>\n"
    assert rendered == prompt + "<think>\nthat is 42.\n</think>\nAnswer: 42<|end|>"
    assert is_correct("42", rendered.removeprefix(prompt))


def test_rendered_continuation_is_raw_text() -> None:
    assert render_example(Example("code", "continue", "def f():\n", "", "    return 1\n")) == (
        "<|endoftext|>def f():\n    return 1\n"
    )
