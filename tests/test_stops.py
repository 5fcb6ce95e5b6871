"""A request's own limit, stop texts and stop tokens, in a line of prompts and for a run. Inside a block they end the
text there, and the drafts behind a stop are neither accepted nor rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import spec_lab
from spec_lab.core.text_stops import TextStops
from spec_lab.record.models import Request
from spec_lab.workloads.prompt_files import shipped_prompts

CHEAP = ["device=cpu", "drafter=oracle", "drafter.num_draft_tokens=3", "repeats=1", "warmup_requests=0"]
CHEAP += ["profile_rounds=0", "max_new_tokens=16", "batch_size=2", "workload=jsonl"]
NAMES = ("own_limit", "own_text", "own_token", "of_the_run")


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    texts = [prompt.text for prompt in shipped_prompts() if prompt.form == "continue"]
    return [{"id": name, "form": "continue", "prompt": text} for name, text in zip(NAMES, texts, strict=False)]


def decoded(folder: Path, lines: list[dict[str, Any]], *overrides: str) -> tuple[dict[str, Request], Any]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    composed = spec_lab.compose([*CHEAP, f"workload.path={file}", f"output_dir={folder}", *overrides])
    result = spec_lab.run(composed)
    return {row.id: row for row in result.requests}, result.run


@pytest.fixture(scope="module")
def whole(lines: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """The outputs without a stop: a token of the prompt pass, then blocks of four, all accepted."""
    return decoded(tmp_path_factory.mktemp("whole"), lines, "references=[]")[0]


def text_up_to(row: Request, num_tokens: int) -> str:
    """The newest characters of the first tokens, as many as the text did not have before."""
    ends = row.text_ends
    assert ends is not None
    end = ends[num_tokens - 1]
    return next(
        text
        for length in range(1, end)
        if (text := row.text[end - length : end]) not in row.text[: end - 1] and length >= end - ends[num_tokens - 2]
    )


@pytest.mark.parametrize(
    "graph",
    [
        ["graph=eager"],
        ["graph=round"],
        ["graph=round", "graph.overlap=true"],
        ["graph=round", "graph.rounds_per_replay=3"],
        ["graph=round", "graph.rounds_per_replay=3", "graph.overlap=true"],
    ],
    ids="-".join,
)
def test_a_stop_inside_a_block_ends_the_text_there(
    graph: list[str], lines: list[dict[str, Any]], whole: dict[str, Request], tmp_path: Path
) -> None:
    """Each in the second block. The oracle knows plain decoding's text up to a stop: its drafts behind are wrong."""
    ids = whole["own_token"].output_ids
    position = next(index for index in (6, 7) if ids[index] not in ids[:index])
    own = [
        {"max_new_tokens": 7},
        {"stop": [text_up_to(whole["own_text"], 8), "never said"]},
        {"stop_token_ids": [ids[position]]},
        {},
    ]
    of_run = text_up_to(whole["of_the_run"], 7)
    told = [line | ends for line, ends in zip(lines, own, strict=True)]
    told[0] |= {"stop": []}  # a line's own, though it is none, stands in place of the run's
    told[2] |= {"stop": []}
    rows, summary = decoded(tmp_path, told, f"workload.stop={json.dumps([of_run])}", *graph)
    expected = {
        "own_limit": (7, [4, 4], "length"),
        "own_text": (8, [4, 3], "stop"),
        "own_token": (position + 1, [4, position - 4], "stop"),
        "of_the_run": (7, [4, 2], "stop"),
    }
    for name, (num_tokens, judged, reason) in expected.items():
        row = rows[name]
        assert row.output_ids == whole[name].output_ids[:num_tokens], name
        accepted = 3 if reason == "length" else min(3, num_tokens - 5)
        assert (row.accepted_per_round, row.judged_per_round) == ([3, accepted], judged), name
        assert row.emitted_per_round == [4, num_tokens - 5] and row.truncated, name
        assert row.finish_reason == reason, name
    assert summary["acceptance_length"] == 4 and summary["divergence.diverged"] == 0


def test_the_text_that_is_checked_ends_before_the_stop(
    lines: list[dict[str, Any]], whole: dict[str, Request], tmp_path: Path
) -> None:
    stop = text_up_to(whole["own_text"], 8)
    before = whole["own_text"].text.partition(stop)[0]
    told = lines[1] | {"stop": stop, "answer": before, "checker": "exact"}
    rows, _ = decoded(tmp_path, [told], "references=[]")
    assert rows["own_text"].correct and rows["own_text"].text.endswith(stop)


def test_a_stop_is_found_across_tokens_and_only_where_it_is_completed() -> None:
    """Characters of several tokens, as byte-level tokenizers have them."""
    stops = TextStops(("né", "\n\n"), lambda ids: bytes(ids).decode(errors="replace"))
    text = "a\nb né\n\n".encode()
    assert [length for length in range(1, len(text) + 1) if stops.completed_by_last(text[:length])] == [7, 9]
    long = b"x" * 500 + text
    assert stops.completed_by_last(long) and not stops.completed_by_last(long + b".")
    assert stops.cut("a\nb né\n\n") == "a\nb "
