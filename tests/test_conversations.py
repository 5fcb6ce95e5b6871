"""Conversations of several turns: what a later turn's prompt holds, and whose answers those are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.config.choices import Unusable
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.measure.runner import record_run
from spec_lab.options.acceptance.lossy import RelaxedThinking
from spec_lab.record.reading import read_requests
from spec_lab.workloads.conversations import before_end, longest_conversation, with_later_turns
from spec_lab.workloads.tokenizer import TargetTokenizer
from tests.fake_runs import CHOICES
from tests.lab import part
from tests.tiny_runs import make_run_config, make_runnable_pair, write_prompts


class Letters:
    """A stand-in for the tokenizer, for which a character is a token."""

    def encode_conversation(self, texts: Sequence[str], system: str | None = None) -> list[int]:
        return [ord(letter) for letter in "|".join(texts if system is None else [system, *texts])]


def request(name: str, *turns: str) -> Request:
    return Request(name, "qa", tuple(map(ord, turns[0])), 4, turns=turns if len(turns) > 1 else ())


def shout(asked: list[Request]) -> list[str]:
    return ["".join(map(chr, each.prompt_ids)).upper() for each in asked]


def texts_of(requests: list[Request]) -> dict[str, str]:
    return {each.request_id: "".join(map(chr, each.prompt_ids)) for each in requests}


def go_on(requests: list[Request], max_seq_len: int = 100, unusable: Unusable = Unusable.refuse) -> dict[str, str]:
    tokenizer: Any = Letters()
    return texts_of(with_later_turns(requests, tokenizer, shout, max_seq_len, unusable))


def test_a_later_turn_is_a_request_whose_prompt_holds_the_answers_so_far() -> None:
    requests = [request("one", "a", "b", "c"), request("alone", "x"), request("two", "d", "e")]
    assert go_on(requests) == {
        "one": "a", "one-turn2": "a|A|b", "one-turn3": "a|A|b|A|A|B|c", "alone": "x", "two": "d", "two-turn2": "d|D|e",
    }  # fmt: skip


def test_a_later_turn_is_told_what_the_first_one_was() -> None:
    told = replace(request("one", "a", "b"), system="s")
    tokenizer: Any = Letters()
    assert texts_of(with_later_turns([told], tokenizer, shout, 100, Unusable.refuse))["one-turn2"] == "s|a|A|b"
    assert longest_conversation([told], tokenizer) == longest_conversation([request("one", "a", "b")], tokenizer) + 4


def test_a_turn_that_is_too_long_is_refused_or_ends_its_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    requests = [request("long", "a", "b" * 20, "c"), request("two", "d", "e")]
    with pytest.raises(UserError, match=r"request long-turn2: 24 prompt and 4 new tokens are longer than 20;"):
        go_on(requests, 20)
    assert list(go_on(requests, 20, Unusable.skip)) == ["long", "two", "two-turn2"]
    assert "request long-turn2" in capsys.readouterr().err


def test_a_conversation_has_room_for_answers_of_any_text() -> None:
    tokenizer: Any = Letters()
    assert longest_conversation([request("one", "aa", "b", "c"), request("x", "x" * 90)], tokenizer) == 4 + 2 * 12 + 4


def test_a_run_asks_all_turns_and_their_context_is_plain_decodings(tmp_path: Path) -> None:
    """Whatever a lossy rule answered itself: its next prompt is that of every other run."""
    pair = make_runnable_pair(tmp_path)
    path = write_prompts(tmp_path / "bench.jsonl", [{"question_id": 1, "category": "qa", "turns": ["<think>ab", "cd"]}])
    lossy, plain = (make_run_config(pair, path, drafter, references=[]) for drafter in ("eagle3", "none"))
    lossy.acceptance = RelaxedThinking(topk=128, delta=1.0)
    rows = {}
    for name, config in (("lossy", lossy), ("plain", plain)):
        config.workload = part("workload", "spec_bench", path=str(path))
        record_run(config, CHOICES, tmp_path / name)
        rows[name] = read_requests(tmp_path / name)
    assert [row.id for row in rows["lossy"]] == ["bench-1", "bench-1-turn2"]
    assert rows["lossy"][0].output_ids != rows["plain"][0].output_ids
    tokenizer = TargetTokenizer(pair[0])
    answer = tokenizer.decode(before_end(rows["plain"][0].output_ids, frozenset({2})))
    expected = tokenizer.encode_conversation(["<think>ab", answer, "cd"])
    assert rows["lossy"][1].prompt_ids == rows["plain"][1].prompt_ids == expected
