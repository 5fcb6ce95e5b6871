"""The corpus: deterministic, split by construction, solvable, and of the length that a request has room for."""

from __future__ import annotations

import ast
import itertools
import json
import operator
import re
from datetime import date, timedelta
from functools import cache
from random import Random
from typing import Any

import pytest

from spec_lab.corpus.categories import CATEGORIES, CHECKABLE_CATEGORIES, NATURAL_CATEGORIES, TASKS, generate
from spec_lab.corpus.difficulty import Difficulty
from spec_lab.corpus.example import Example, render_example
from spec_lab.corpus.natural import code_documents, prose_documents
from spec_lab.corpus.phrasing import Phraser, compile_rules, parse
from spec_lab.corpus.split import split_of
from spec_lab.workloads.checker import is_correct
from spec_lab.workloads.make_prompts import telling_windows
from spec_lab.workloads.prompt_files import PROMPTS_FOLDER
from tests.few_sources import all_sources

MAX_RENDERED_CHARACTERS = 1120  # 320 tokens of 3.5 characters


@cache
def examples(category: str) -> tuple[Example, ...]:
    return tuple(itertools.islice(generate(category, "train", seed=3), 100))


def shipped_prompts(category: str) -> list[dict[str, Any]]:
    lines = (PROMPTS_FOLDER / f"{category}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def final_answer(example: Example) -> str:
    return example.answer.removeprefix("Answer: ")


@pytest.mark.parametrize("category", CATEGORIES)
def test_same_seed_same_text(category: str) -> None:
    again = tuple(itertools.islice(generate(category, "train", seed=3), 30))
    other = tuple(itertools.islice(generate(category, "train", seed=4), 30))
    assert again == examples(category)[:30]
    assert not set(again) & set(other)


@pytest.mark.parametrize("category", CATEGORIES)
def test_shipped_prompts_are_complete(category: str) -> None:
    records = shipped_prompts(category)
    assert len({record["prompt"] for record in records}) == len({record["id"] for record in records}) >= 64
    for record in records:
        assert record["category"] == category
        assert record["form"] == ("continue" if category in NATURAL_CATEGORIES else "chat")
        assert (record["answer"] is None) == (category in NATURAL_CATEGORIES)


def test_nine_categories_ship() -> None:
    assert len(CATEGORIES) == 9
    assert {path.stem for path in PROMPTS_FOLDER.glob("*.jsonl")} == set(CATEGORIES)


def test_the_split_of_a_key_never_changes() -> None:
    """Pinned: a salted or different hash would move problems across the border that shipped prompts rely on."""
    in_eval = [number for number in range(300) if split_of(f"key {number}") == "eval"]
    assert in_eval == [75, 96, 196, 226, 264, 266, 291]


@pytest.mark.parametrize(
    "category",
    CHECKABLE_CATEGORIES,
)
def test_a_problem_is_on_one_side_only(category: str) -> None:
    """The split is a function of the key, and so is the question, but for the scene and the wording."""
    random = Random(0)
    tasks = [TASKS[category](random, Difficulty()) for _ in range(2000)]
    eval_keys = {task.key for task in tasks if split_of(f"{category}: {task.key}") == "eval"}
    assert 15 <= len(eval_keys) <= 80
    shipped = {frozenset(re.findall(r"\d+|\b[A-Z][a-z]+\b", record["prompt"])) for record in shipped_prompts(category)}
    training = {frozenset(re.findall(r"\d+|\b[A-Z][a-z]+\b", example.prompt)) for example in examples(category)}
    assert not shipped & training


@pytest.mark.parametrize("category", CHECKABLE_CATEGORIES)
def test_generated_problems_carry_keys_of_their_split(category: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr("spec_lab.corpus.categories.tell", lambda _category, task, *_: told.append(task.key))
    for split in ("train", "eval"):
        told.clear()
        list(itertools.islice(generate(category, split, seed=5), 60))
        assert {split_of(f"{category}: {key}") for key in told} == {split}


def test_shipped_continuations_share_no_long_window_with_training(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {category: shipped_prompts(category)[:12] for category in NATURAL_CATEGORIES}
    monkeypatch.setattr("spec_lab.corpus.natural._sources", all_sources)
    training = "\n".join(code_documents.__wrapped__("train") + prose_documents.__wrapped__("train"))
    for record in itertools.chain.from_iterable(prompts.values()):
        for window in sorted(telling_windows(record["prompt"]))[::40]:
            assert window not in training, record["id"]


@pytest.mark.parametrize("category", CHECKABLE_CATEGORIES)
def test_lengths_fit_a_request(category: str) -> None:
    assert max(len(render_example(example)) for example in examples(category)) <= MAX_RENDERED_CHARACTERS
    mean = sum(len(example.thinking) for example in examples(category)) / len(examples(category))
    assert 150 <= mean <= 500


@pytest.mark.parametrize("category", CHECKABLE_CATEGORIES)
def test_wordings_vary_and_the_checker_agrees(category: str) -> None:
    assert len({example.thinking for example in examples(category)}) == len(examples(category))
    for example in examples(category):
        assert is_correct(final_answer(example), render_example(example))
        assert not re.search(r"[\[\]{}]", example.thinking), example.thinking


@pytest.mark.parametrize("category", NATURAL_CATEGORIES)
def test_continuations_are_natural_cuts(category: str) -> None:
    for example in examples(category):
        assert 200 <= len(example.prompt) <= 501
        assert example.prompt.endswith("\n") if category == "code" else example.answer[0] == " "


def run_program(source: str) -> int:
    """The number that a program prints, found by walking its syntax tree: nothing is executed."""
    operators: dict[type, Any] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Mod: operator.mod,
    }
    variables: dict[str, int] = {}
    printed: list[int] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(operators[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Compare):
            return value(node.left) < value(node.comparators[0])
        if isinstance(node, ast.Name):
            return variables[node.id]
        assert isinstance(node, ast.Constant)
        assert isinstance(node.value, int)
        return node.value

    def run(statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.Assign):
                assert isinstance(statement.targets[0], ast.Name)
                variables[statement.targets[0].id] = value(statement.value)
            elif isinstance(statement, ast.For):
                assert isinstance(statement.iter, ast.Call)
                for _ in range(value(statement.iter.args[0])):
                    run(statement.body)
            elif isinstance(statement, ast.If):
                run(statement.body if value(statement.test) else statement.orelse)
            else:
                assert isinstance(statement, ast.Expr)
                assert isinstance(statement.value, ast.Call)
                printed.append(value(statement.value.args[0]))

    run(ast.parse(source).body)
    return printed[0]


def test_trace_answers() -> None:
    for example in examples("trace"):
        source = re.search(r"^[a-z] = .*", example.prompt, flags=re.MULTILINE | re.DOTALL)
        assert source
        assert str(run_program(source.group())) == final_answer(example)


def test_dates_answers() -> None:
    for example in examples("dates"):
        weekday, day, month, year = re.search(r"(\w+day), (\d+) (\w+) (\d{4})", example.prompt).groups()  # type: ignore[union-attr]
        months = [date(2001, number, 1).strftime("%B") for number in range(1, 13)]
        start = date(int(year), months.index(month) + 1, int(day))
        later, earlier = map(int, re.findall(r"(\d+) days", example.prompt))
        end = start + timedelta(days=later) - timedelta(days=earlier)
        assert start.strftime("%A") == weekday
        assert final_answer(example) == f"{end.strftime('%A')}, {end.day} {end.strftime('%B')}"


def test_units_answers() -> None:
    for example in examples("units"):
        rules = re.findall(r"(\d+) (\w+) (?:make|are|count as|are worth) one of the (\w+)", example.prompt)
        holds = {large: (int(n), small) for n, small, large in rules}
        stock = re.search(r"(?:has|owns|counts|holds) (\d+ \w+(?: and \d+ \w+)*)\.", example.prompt)
        assert stock
        total = 0
        for quantity, unit in re.findall(r"(\d+) (\w+)", stock.group(1)):
            amount = int(quantity)
            while unit in holds:
                factor, unit = holds[unit]
                amount *= factor
            total += amount
        assert str(total) == final_answer(example)


def test_order_answers() -> None:
    behind = {"younger", "shorter", "slower", "poorer", "weaker"}
    for example in examples("order"):
        follows = {}
        for left, word, right in re.findall(r"(\w+) is (?:just|one place) (\w+) than (\w+)\.", example.prompt):
            follows.update({right: left} if word in behind else {left: right})
        (front,) = set(follows) - set(follows.values())
        line = [front]
        while line[-1] in follows:
            line.append(follows[line[-1]])
        place = re.search(r"who is (\w+)\?", example.prompt)
        assert place
        index = ("first", "second", "third", "fourth", "fifth", "sixth").index(place.group(1))
        assert line[index] == final_answer(example)
        assert len(line) == len(follows) + 1


def test_lookup_answers() -> None:
    for example in examples("lookup"):
        rows = [line.split(" | ") for line in example.prompt.splitlines() if re.fullmatch(r"(\w+ \| ){3}\d+", line)]
        price = {cell: int(row[3]) for row in rows for cell in row[:3]}
        question = example.prompt.splitlines()[-1]
        first, second = (price[cell] for cell in re.findall(r"at the (?:name|colour|animal) (\w+)", question))
        expected = abs(first - second) if "apart" in question else first + second
        if "twice" in question:
            expected = 2 * first - second
        assert str(expected) == final_answer(example)


def test_arithmetic_answers() -> None:
    """The answer follows from the words of the prompt alone."""
    loses = re.compile(r"(sells|loses|breaks|gives away|drops|takes|steals|buys|borrows) \d+( of them)?\.")
    for example in examples("arithmetic"):
        story = example.prompt[re.search(r"(?:has|owns|keeps|holds) (a \w+ of )?\d+ ", example.prompt).start() :]  # type: ignore[union-attr]
        opening, *events = re.findall(r"[^.?]*\d+[^.?]*\.", story)
        amount = int(re.findall(r"\d+", opening)[0])
        for event in events:
            number = int(re.findall(r"\d+", event)[0])
            if "equal parts" in event:
                assert amount % number == 0
                amount //= number
            elif "times as many" in event:
                amount *= number
            else:
                amount += -number if loses.search(event) else number
        assert str(amount) == final_answer(example)


def test_lists_answers() -> None:
    operations: dict[str, Any] = {
        "reverse the list": lambda n: list(reversed(n)),
        "sort it upwards": sorted,
        "sort it downwards": lambda n: sorted(n)[::-1],
        "drop the largest": lambda n: [x for x in n if x != max(n)],
        "drop the smallest": lambda n: [x for x in n if x != min(n)],
        "drop the first": lambda n: n[1:],
        "drop the last": lambda n: n[: len(n) - 1],
        "move the first to the end": lambda n: n[1:] + n[:1],
        "move the last to the front": lambda n: n[-1:] + n[:-1],
        "swap the two ends": lambda n: n[-1:] + n[1:-1] + n[:1],
        "add 7 to each": lambda n: [x + 7 for x in n],
        "double each": lambda n: [x + x for x in n],
    }
    wanted: dict[str, Any] = {
        "the second number": lambda n: n[1],
        "the last number": lambda n: n[-1],
        "the sum of the first two": lambda n: sum(n[:2]),
        "the sum of the two ends": lambda n: n[0] + n[-1],
        "the largest less the smallest": lambda n: max(n) - min(n),
    }
    for example in examples("lists"):
        match = re.search(r"(\d+(?:, \d+)+)\. (.*?)\. (?:What is|Tell me|Give me|Find) (.*)[.?]$", example.prompt)
        assert match
        numbers = [int(number) for number in match.group(1).split(", ")]
        for step in match.group(2).lower().split("; "):
            numbers = operations[step](numbers)
        assert str(wanted[match.group(3)](numbers)) == final_answer(example)


def test_phraser_draws_every_alternative_and_prefers_values() -> None:
    say = Phraser(Random(0), compile_rules({"so": "then | now[| again]"}), {"name": "Ada"})
    assert {say.say("{so}, {name} {n}", n=3) for _ in range(200)} == {"then, Ada 3", "now, Ada 3", "now again, Ada 3"}
    assert say.sentence("{name} is here", name="bob") == "Bob is here."
    with pytest.raises(KeyError):
        say.say("{nothing}")


@pytest.mark.parametrize("template", ["[a|b", "a]b", "a|b"])
def test_unbalanced_templates_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match="template"):
        parse(template)


def test_unknown_category_is_refused() -> None:
    with pytest.raises(ValueError, match="category='poems'"):
        generate("poems", "train", 0)
