"""workload=generated: as many checkable prompts as wanted, the same for a seed, none of the training split."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import compose
from spec_lab.core.types import Request
from spec_lab.corpus.categories import CHECKABLE_CATEGORIES, Split, generate
from spec_lab.corpus.example import ASSISTANT, THINK_END, Example
from spec_lab.menu.chosen import choose
from spec_lab.wiring.workloads import load_requests
from spec_lab.workloads.checker import is_correct
from spec_lab.workloads.generated import answer_of, generated_examples

ROOT = Path(__file__).parents[1]


class Letters:
    """A stand-in for the tokenizer, for which a character is a token."""

    vocab_size = 256

    def encode_prompt(self, form: str, prompt: str, system: str | None = None) -> list[int]:
        return [ord(letter) % 256 for letter in f"{form}:{prompt}{ASSISTANT}"]


def requests_of(*overrides: str) -> list[Request]:
    config = compose(["workload=generated", *overrides]).config
    tokenizer: Any = Letters()
    return load_requests(choose(config), tokenizer)


def test_so_many_of_each_checkable_category_in_turn() -> None:
    requests = requests_of("workload.per_category=3")
    assert Counter(request.category for request in requests) == dict.fromkeys(CHECKABLE_CATEGORIES, 3)
    assert len({request.category for request in requests[:7]}) == 7
    assert len({request.prompt_ids for request in requests}) == 21
    assert all(request.answer for request in requests)
    assert requests[0].request_id == f"{requests[0].category}-s0-0001"


def test_the_seed_decides() -> None:
    first, again, other = (requests_of("workload.per_category=2", f"seed={seed}") for seed in (0, 0, 1))
    assert first == again
    assert not {request.request_id for request in first} & {request.request_id for request in other}
    assert {request.prompt_ids for request in first} != {request.prompt_ids for request in other}


def test_more_prompts_begin_with_the_fewer() -> None:
    few, many = (generated_examples(["lists"], count, 0)["lists"] for count in (2, 5))
    assert many[:2] == few


def test_prompts_are_of_the_eval_split_and_the_checker_takes_their_answers() -> None:
    [example] = generated_examples(["dates"], 1, 0)["dates"]
    assert example == next(generate("dates", "eval", 0))
    assert is_correct(answer_of(example), f"so{THINK_END}\n{example.answer}")


def test_categories_and_limit_hold() -> None:
    requests = requests_of("workload.per_category=4", "workload.categories=[lists,dates]", "workload.limit=5")
    assert [request.category for request in requests] == ["lists", "dates", "lists", "dates", "lists"]


@pytest.mark.parametrize("limit", [1, 6, 7, 8, 14])
def test_a_limit_takes_the_same_prompts(limit: int) -> None:
    few = requests_of("workload.per_category=10000", f"workload.limit={limit}")
    assert few == requests_of("workload.per_category=2")[:limit]


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (7, 1), (8, 2), (15, 3)])
def test_a_limit_draws_no_more_than_it_needs(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand of each of the seven categories would take a minute."""
    drawn: Counter[str] = Counter()

    def counted(category: str, split: Split, seed: int) -> Iterator[Example]:
        for example in generate(category, split, seed):
            drawn[category] += 1
            assert drawn[category] <= 100, "far more than are needed"
            yield example

    monkeypatch.setattr("spec_lab.corpus.categories.generate", counted)
    generated_examples(None, 10_000, seed=1000 + limit, limit=limit)
    assert len(drawn) == len(CHECKABLE_CATEGORIES) == 7
    assert set(drawn.values()) == {most}


def test_a_category_that_runs_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw would go on for ever."""
    three = list(islice(generate("dates", "eval", 5), 3))
    monkeypatch.setattr("spec_lab.corpus.categories.generate", lambda *_: cycle(three))
    assert len(generated_examples(["dates"], 3, 987)["dates"]) == 3
    with pytest.raises(
        ValueError, match=r"of dates are needed, and only 3 different ones.*use workload\.per_category=3"
    ):
        generated_examples(["dates"], 4, 987)


def test_a_category_without_answers_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"workload\.categories: no checkable problems .* for "
        "prose; use some of arithmetic",
    ):
        requests_of("workload.categories=[prose,lists]")


def test_other_workloads_do_not_import_the_corpus() -> None:
    code = "import sys, spec_lab.workloads.load; assert 'spec_lab.train' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_knob_lost_on_the_way_is_named() -> None:
    config = compose(["workload=generated"]).config
    tokenizer: Any = Letters()
    with pytest.raises(ValueError, match=r"needs workload\.per_category"):
        load_requests(choose(replace(config, workload=replace(config.workload, per_category=None))), tokenizer)
