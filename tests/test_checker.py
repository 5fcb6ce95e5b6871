"""The checkers of answers, on the texts that models really leave behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.app.compose import compose
from spec_lab.config.checks import problems
from spec_lab.config.option import options
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason, Request
from spec_lab.measure.answers import check_answers, note_unread
from spec_lab.workloads.checker import Checked, check
from spec_lab.workloads.thinking import reply_of
from tests.fake_runs import make_request

ROWS = dict(options("workload.checker"))


def read(checker: str, text: str) -> str | None:
    return check(ROWS[checker], "", text).read


THOUGHT = ("", "<think>\n6 times 7, Answer: 13, \\boxed{13}, (C)\n</think>\n", "<|channel>thought\n(C) 13\n<channel|>")
"""Nothing, and thinking of two families, which names other answers."""
READ = [
    ("answer", "Answer: 42", "42"),
    ("answer", "Answer:   42. \nand so on", "42"),
    ("answer", "Answer: 41\nAnswer: 42", "42"),
    ("answer", "**Answer:** 42", "42"),
    ("answer", "**Answer: 42**", "42"),
    ("answer", "The answer is: `42`.", "42"),
    ("answer", "Answer: Monday,  22 May", "monday, 22 may"),
    ("answer", "it is 42", None),
    ("answer", "Answer:", None),
    ("answer", "Answer:\n42", None),
    ("answer", "", None),
    ("last_number", "so 6 * 7 = 42", "42"),
    ("last_number", "Natalia sold 48/2 = 24\n#### 72", "72"),
    ("last_number", "that is $1,234.50.", "1234.50"),
    ("last_number", "minus: \u22123", "-3"),
    ("last_number", "between 3-4", "4"),
    ("last_number", "about .5 of it", ".5"),
    ("last_number", "none", None),
    ("boxed", "so \\boxed{42}.", "42"),
    ("boxed", "$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
    ("boxed", "\\boxed{1} or \\boxed{2}", "2"),
    ("boxed", "\\boxed{4", None),
    ("boxed", "42", None),
    ("choice", "Answer: B", "B"),
    ("choice", "The correct answer is (B) because A is wrong", "B"),
    ("choice", "**Answer: B**", "B"),
    ("choice", "The answer is A because it is", "A"),
    ("choice", "the best option is C because A is wrong", "C"),
    ("choice", "\\boxed{B}", "B"),
    ("choice", "(B)", "B"),
    ("choice", "B. Paris", "B"),
    ("choice", "A dog is in the house", None),
    ("choice", "the answer is a dog", None),
    ("exact", " 42\n", "42"),
    ("exact", "", None),
]


@pytest.mark.parametrize("thought", THOUGHT)
@pytest.mark.parametrize(("checker", "text", "answer"), READ)
def test_what_is_read_is_behind_the_thinking_if_there_is_any(
    checker: str, text: str, answer: str | None, thought: str
) -> None:
    assert read(checker, thought + text) == answer
    assert read(checker, f"{thought}{text}<|end|>\n<|user|>\nAnswer: 13, (C) \\boxed{{13}}") == answer


@pytest.mark.parametrize("checker", ROWS)
@pytest.mark.parametrize("text", ["<think>\nAnswer: 42 \\boxed{42} (B)", "<|channel>thought\nAnswer: 42 (B)"])
def test_thinking_that_is_cut_off_has_no_answer_yet(checker: str, text: str) -> None:
    assert read(checker, text) is None
    assert read(checker, f"<think>a</think>\n{text}") is None
    inside = text.partition("\n")[2]
    assert reply_of(inside, thinking_open=True) is None, "the template has opened it in the prompt"
    assert reply_of(f"{inside}</think>42", thinking_open=True) == "42"


SAME = [
    ("answer", "Monday, 22 May", "Answer: monday,  22 may."),
    ("last_number", "42", "it is 42.0"),
    ("last_number", "1234.5", "it is $1,234.50"),
    ("last_number", "48/2 = 24, so 72\n#### 72", "72"),
    ("boxed", "\\frac12", "\\boxed{\\dfrac12}"),
    ("boxed", "42", "$\\boxed{ 42.0 }$"),
    ("boxed", "so \\boxed{x + 1}", "\\boxed{x+1}"),
    ("choice", "b", "The answer is (B)"),
    ("choice", "(B)", "B) Paris"),
    ("exact", "x = 1\n", "x = 1"),
]
OTHER = [
    ("answer", "Monday, 2 May", "Answer: Monday, 22 May"),
    ("last_number", "4", "42"),
    ("last_number", "none", "42"),
    ("boxed", "\\frac13", "\\boxed{\\frac12}"),
    ("choice", "A", "The answer is (B)"),
    ("exact", "x = 1", "X = 1"),
    ("exact", "1", "it is 1"),
]


@pytest.mark.parametrize(
    ("checker", "expected", "text", "correct"), [*((*c, True) for c in SAME), *((*c, False) for c in OTHER)]
)
def test_answers_are_the_same_whatever_does_not_change_them(
    checker: str, expected: str, text: str, correct: bool
) -> None:
    assert check(ROWS[checker], expected, text).correct is correct


@given(
    text=st.text(alphabet="\\boxed{}<think>/Answer: 0,.-eE()AB*$\n#\u0663", max_size=60), expected=st.text(max_size=9)
)
@pytest.mark.parametrize("checker", ROWS)
def test_any_text_is_read(checker: str, text: str, expected: str) -> None:
    found = check(ROWS[checker], expected, text)
    assert found.read is not None or not found.correct


class Parts:
    """What is asked of a loaded lab, of a target whose end of sequence is 0."""

    def __init__(self, config: Run, requests: list[Request], texts: dict[int, str]) -> None:
        self.config, self.requests, self.texts = config, requests, texts
        self.chosen = config
        self.tokenizer = self
        traits = SimpleNamespace(imposed=False)
        self.engines = {"run": SimpleNamespace(parts=SimpleNamespace(rule=SimpleNamespace(traits=traits)))}
        self.models = SimpleNamespace(markers=None, target=SimpleNamespace(eos_token_ids=frozenset([0])))

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.texts[token] for token in token_ids)


def checked_of(config: Run, text: str, **changes: Any) -> tuple[Any, list[RequestRecord]]:
    record = make_request("r0", [])
    record.output_ids, record.answer, record.finish_reason = [1, 0, 2], "42", FinishReason.EOS
    request = Request("r0", "c", (1,), 4, answer="42", **changes)
    lab: Any = Parts(config, [request], {1: text, 0: "<eos>", 2: " 13"})
    return check_answers(lab, "run", [record]), [record]


def test_the_prompt_or_the_workload_names_the_checker(capsys: pytest.CaptureFixture[str]) -> None:
    """What stands behind an end of sequence is not read, and the mark of the end is no part of an answer."""
    config = compose(["workload.checker=last_number"]).config
    checked, records = checked_of(config, "it is 42")
    assert checked["r0"] == Checked("last_number", "42", True)
    note_unread(records, checked)
    assert capsys.readouterr().err == ""
    checked, records = checked_of(config, "it is 42", checker="exact")
    assert checked["r0"] == Checked("exact", "it is 42", False)
    checked, records = checked_of(config, "it is 42", checker="boxed")
    assert checked["r0"] == Checked("boxed", None, False)
    note_unread(records, checked)
    assert "checker boxed found no answer in 1 of 1 outputs" in capsys.readouterr().err


@pytest.fixture
def yes(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An extension with checkers, of which some fail."""
    monkeypatch.syspath_prepend(str(empty_folder))
    name = f"says_{empty_folder.name}"
    Path(f"{name}.py").write_text(
        "from spec_lab.config.option import option\n"
        "from spec_lab.workloads.checker import Checker\n"
        "def add(name, read, same):\n"
        "    functions = {'read': staticmethod(read), 'same': staticmethod(same)}\n"
        "    option('workload.checker', name)(type(name, (Checker,), functions))\n"
        "add('yes', lambda reply: 'yes' if 'yes' in reply else None, lambda expected, answer: True)\n"
        "add('broken', lambda reply: 1 / 0, str.__eq__)\n"
        "add('reads_a_list', list, list.__contains__)\n"
        "add('says_yes', str, str.__add__)\n"
    )
    return name


def test_an_extension_brings_its_own(yes: str) -> None:
    config = compose([f"extensions=[{yes}]", "workload.checker=yes"]).config
    assert list(problems(config)) == []
    assert checked_of(config, "oh yes")[0]["r0"] == Checked("yes", "yes", True)
    for name, why in (("broken", "ZeroDivisionError"), ("reads_a_list", "a list"), ("says_yes", "same gives a str")):
        config.workload.checker = name
        with pytest.raises(UserError, match=rf"workload\.checker={name} fails on the output of r0 \(.*{why}"):
            checked_of(config, "oh yes")


@pytest.mark.parametrize(
    ("checker", "expected", "known"),
    [
        ("last_number", "#### 42", True),
        ("last_number", "forty", False),
        ("choice", "b", True),
        ("choice", "AB", False),
        ("choice", "1", False),
        ("answer", " ", False),
        ("exact", ".", True),
        ("boxed", "\\frac{1}{2}", True),
        ("boxed", "\\frac{1", False),
    ],
)
def test_an_answer_that_no_output_can_give_is_known_before_the_run(checker: str, expected: str, known: bool) -> None:
    assert ROWS[checker].expects(expected) is known
