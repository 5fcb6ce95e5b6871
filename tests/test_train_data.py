"""Texts of runs: what is read of a run of the lab, what is refused, how they are split, packed and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spec_lab
from spec_lab.core.errors import UserError
from spec_lab.train.data import (
    Text,
    Texts,
    TextsOrigin,
    learnt_and_held_out,
    place_texts,
    read_run,
    read_runs,
    split,
)
from spec_lab.train.head import draft_vocabulary
from spec_lab.train.serving import origin_of
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_runs import write_prompts
from tests.train_lab import record_run, texts_of

POCKET = Path(spec_lab.__file__).parent / "zoo" / "pocket"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "target"
    make_tiny_target(folder, "llama")
    return folder


def text_of(ids: list[int], prompt_length: int, conversation: str = "", category: str = "c") -> Text:
    return Text(np.array(ids, dtype=np.int32), prompt_length, category, (conversation or str(ids)).encode())


def test_a_run_of_the_lab_is_read_with_its_conversations(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": text} for text in turns]} for turns in (["A", "B"], ["C"])]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    words = ["drafter=none", "references=[]", "repeats=1", "warmup_requests=0", "profile_rounds=0", "max_new_tokens=6"]
    words += ["workload=jsonl", f"workload.path={prompts}", f"output_dir={tmp_path}", "record.audit=false"]
    run = spec_lab.run(spec_lab.compose(words))
    found = read_run(run.folder)
    assert found.origin == origin_of(POCKET) and found.workload == "jsonl"
    for text, row in zip(found.texts, run.requests, strict=True):
        assert text.ids.tolist() == [*row.prompt_ids, *row.output_ids]
        assert text.prompt_length == len(row.prompt_ids)
    first, second, other = found.texts
    assert first.conversation == second.conversation != other.conversation
    assert first.prompt_length < second.prompt_length


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": "0123456789ab"}, "target is 0123456789ab"),
        ({"template": "0123456789ab"}, "template is 0123456789ab"),
        ({"thinking": True}, "thinking is True, not None"),
        ({"workload": "spec_bench"}, "workload=spec_bench is for testing"),
        ({"status": "interrupted"}, "this run is interrupted"),
    ],
    ids=str,
)
def test_runs_that_a_head_must_not_learn_from_are_refused(
    changes: dict[str, Any], reason: str, target: Path, tmp_path: Path
) -> None:
    record_run(tmp_path / "texts-1", target)
    record_run(tmp_path / "texts-2", target, **changes)
    with pytest.raises(UserError, match=reason):
        read_runs(str(tmp_path / "texts-*"), origin_of(target))


def test_questions_for_testing_may_be_held_out(target: Path, tmp_path: Path) -> None:
    record_run(tmp_path / "bench", target, workload="spec_bench", thinking=True)
    origin = TextsOrigin(*(getattr(origin_of(target), name) for name in ("target", "template")), thinking=True)
    assert len(read_runs(str(tmp_path / "bench"), origin, are_learnt=False)) == 1
    record_run(tmp_path / "learnt", target)
    data = read_runs(str(tmp_path / "learnt"), origin_of(target))
    with pytest.raises(UserError, match="24 of its prompts are in data too"):
        learnt_and_held_out(data, [read_run(tmp_path / "bench")], 0.1)


def test_turns_of_a_conversation_and_equal_prompts_are_held_out_together() -> None:
    texts = [text_of([number, 2, turn], 1, f"conversation {number}") for number in range(30) for turn in range(2)]
    learnt, held_out = split(texts, 0.3)
    names = [{text.conversation for text in part.texts} for part in (learnt, held_out)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 30 and 3 < len(names[1]) < 16
    assert len(learnt) + len(held_out) == 60
    least, most = split(texts, 1e-9)[1], split(texts, 1.0)[0]
    assert len(least) == len(most) == 2, "each part gets at least one conversation"
    with pytest.raises(UserError, match="1 conversations"):
        split(texts[:2], 0.5)


def test_rows_hold_whole_texts_and_only_what_was_written_counts(target: Path, tmp_path: Path) -> None:
    texts = texts_of(record_run(tmp_path / "texts", target))
    rows = texts.packed(40, seed=1)
    found = []
    for row in range(len(rows)):
        for number in range(1, int(rows.segments[row].max()) + 1):
            inside = rows.segments[row] == number
            columns = inside.nonzero()[:, 0]
            assert columns.diff().eq(1).all() and rows.positions[row, inside].tolist() == list(range(len(columns)))
            assert rows.is_supervised[row, inside].tolist() == [place >= 5 for place in range(len(columns))]
            found.append(rows.tokens[row, inside].tolist())
    assert sorted(found) == sorted(text.ids[:40].tolist() for text in texts.texts)
    assert not rows.is_supervised[rows.segments == 0].any() and (rows.segments > 0).float().mean() > 0.75
    again, other = texts.packed(40, seed=1), texts.packed(40, seed=2)
    assert torch.equal(again.tokens, rows.tokens) and not torch.equal(other.tokens, rows.tokens)


def test_a_text_longer_than_a_row_is_cut_and_one_whose_prompt_fills_it_is_left_out() -> None:
    rows = Texts([text_of([*range(1, 13)], 3), text_of([*range(20, 31)], 8)]).packed(8, 0)
    assert rows.tokens.tolist() == [[*range(1, 9)]] and rows.is_supervised.sum() == 5
    with pytest.raises(UserError, match="row_length=3 has room for prompts alone"):
        Texts([text_of([1, 2, 3, 4], 3)]).packed(3, 0)


def test_texts_are_placed_into_the_fullest_row_that_has_room() -> None:
    assert place_texts([6, 4, 3, 4, 10, 3], 10) == [(0, 0, 1), (0, 6, 2), (1, 0, 1), (1, 3, 2), (2, 0, 1), (1, 7, 3)]


def test_the_draft_vocabulary_is_what_the_target_writes_and_what_ends_a_text() -> None:
    class Sizes:
        vocab_size, eos_token_ids = 10, {8}

    class Target:
        config = Sizes()

    texts, frozen = Texts([text_of([7, 7, 7, 3, 3, 5], 3), text_of([7, 2, 3, 5, 5, 2], 1)]), Target()
    # Written: 3 3 5 and 2 3 5 5 2; the prompts' sevens do not count.
    assert draft_vocabulary(texts, frozen, 3).tolist() == [3, 5, 8]  # type: ignore[arg-type]
    for size in (None, 10, 99):
        assert draft_vocabulary(texts, frozen, size).tolist() == [*range(10)]  # type: ignore[arg-type]


def test_held_out_prompts_are_taken_from_the_categories_in_turn() -> None:
    texts = [text_of([place, 1], 1, category=category) for place, category in enumerate("aaabbc")]
    assert [text.category for text in Texts([*texts, texts[0]]).in_turn(5)] == ["a", "b", "c", "a", "b"]


def test_batches_depend_on_seed_and_step_alone_and_each_epoch_has_every_row(target: Path, tmp_path: Path) -> None:
    rows = texts_of(record_run(tmp_path / "texts", target)).packed(40, 0)
    epoch = [row for step in range(len(rows)) for row in rows.batch(step, 2, seed=3).tokens.tolist()]
    assert sorted(epoch) == sorted(2 * rows.tokens.tolist()) and epoch[: len(rows)] != epoch[len(rows) :]
    assert torch.equal(rows.batch(4, 2, 3).tokens, rows.batch(4, 2, 3).tokens)
    assert not torch.equal(rows.batch(4, 2, 3).tokens, rows.batch(4, 2, 4).tokens)
