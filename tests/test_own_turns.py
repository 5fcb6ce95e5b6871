"""A target writes the user's turns itself, and a next run asks what an earlier one answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import spec_lab
from spec_lab.workloads.own_turns import openings, outputs_of, whole_sentences
from spec_lab.workloads.tokenizer import TargetTokenizer

POCKET = Path(spec_lab.__file__).parent / "zoo" / "pocket"
CHEAP = ["references=[]", "repeats=1", "warmup_requests=0", "profile_rounds=0", "record.audit=false"]
CHEAP += ["drafter=none", "batch_size=8"]


def run(folder: Path, *words: str) -> Any:
    return spec_lab.run(spec_lab.compose([*CHEAP, f"output_dir={folder}", *words]))


def test_a_limit_holds_for_begun_turns(tmp_path: Path) -> None:
    assert len(run(tmp_path, "workload=user_turns", "workload.limit=3", "max_new_tokens=2").requests) == 3


def test_turns_that_a_target_wrote_are_asked_in_its_template(tmp_path: Path) -> None:
    sampled = ["sampling.temperature=1.0", "acceptance=rejection", "acceptance.method=one_hot"]
    begun = run(tmp_path, "workload=user_turns", "workload.num_requests=24", "max_new_tokens=16", *sampled)
    tokenizer = TargetTokenizer(POCKET)
    assert all(tokenizer.decode(row.prompt_ids).startswith("<|user|>\n") for row in begun.requests)
    kinds = {opening.kind: opening.max_tokens for opening in openings()}
    assert all(len(row.output_ids) <= kinds[row.category] for row in begun.requests)
    asked = run(tmp_path, "workload=outputs", f"workload.path={begun.folder}", "max_new_tokens=4")
    by_id = {row.id: row for row in begun.requests}
    assert 12 < len(asked.requests) <= 24
    for row in asked.requests:
        words = tokenizer.decode(by_id[row.id].prompt_ids).removeprefix("<|user|>\n")
        prompt = tokenizer.decode(row.prompt_ids)
        assert prompt.startswith(f"<|user|>\n{words}") and prompt.endswith("<|end|>\n<|assistant|>\n")
        assert prompt.count("<|end|>") == 1
    again = run(tmp_path / "again", "workload=outputs", f"workload.path={asked.folder}", "max_new_tokens=2")
    texts = {tokenizer.decode(row.prompt_ids) for row in again.requests}
    assert len(texts) == len(again.requests), "answers that repeat are asked once"


def test_an_opening_depends_on_the_seed_and_its_number_alone(tmp_path: Path) -> None:
    few, more, other = (
        [row.prompt_ids for row in run(tmp_path / str(place), "workload=user_turns", *words).requests]
        for place, words in enumerate(
            [
                ("workload.num_requests=4", "max_new_tokens=2"),
                ("workload.num_requests=6", "max_new_tokens=2"),
                ("workload.num_requests=6", "max_new_tokens=2", "seed=1"),
            ]
        )
    )
    assert few == more[:4] != other[:4]


def test_a_turn_that_ran_into_its_limit_loses_its_last_sentence() -> None:
    assert whole_sentences('He said "no." Then he') == 'He said "no."'
    assert whole_sentences("no end at all") == "no end at all"
    assert whole_sentences("3.5 is a number? Yes") == "3.5 is a number?"


def test_outputs_with_few_words_or_of_the_same_words_are_left_out(tmp_path: Path) -> None:
    tokenizer = TargetTokenizer(POCKET)
    rows = []
    for name, text, reason in (
        ("a", "What is 2 plus 2?", "length"),
        ("b", "what is 2, plus 2", "length"),
        ("c", "Why?", "length"),
        ("d", "Tell me a story.", "eos"),
    ):
        ids = tokenizer.encode(text) + ([tokenizer.special_id("<|end|>")] if reason == "eos" else [])
        rows.append({"id": name, "category": "x", "prompt_ids": [1], "output_ids": ids, "finish_reason": reason})
    (tmp_path / "requests.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "summary.json").write_text('{"status": "finished", "config": {"workload": {"name": "pocket"}}}')
    found = outputs_of(tmp_path, tokenizer)
    assert [(prompt.prompt_id, prompt.text) for prompt in found] == [
        ("a", "What is 2 plus 2?"),
        ("d", "Tell me a story."),
    ]
