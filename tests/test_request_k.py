"""K by request: a request offers what it is told, its text stays plain decoding's, and off is plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.workloads.prompt_files import read_jsonl
from tests.graph_lab import MODES
from tests.lab import generate, make_config, make_engine, part, random_requests


@pytest.mark.parametrize("graph", [None, "round", "overlap", "step_replay"])
def test_requests_offer_what_their_line_says(pair: tuple[Path, Path], graph: str | None) -> None:
    """Slots are used again, by requests of another K; the last ones are off, so that rounds become plain ones."""
    requests = random_requests(5, max_new_tokens=12)
    for index, k in enumerate((0, None, 1, 2, 0)):
        requests[index] = replace(requests[index], num_draft_tokens=k)
    requests[4] = replace(requests[4], max_new_tokens=24, ignore_eos=True)
    config = make_config(pair, batch_size=2, options={"plan": "given"})
    engine = make_engine(config if graph is None else replace(config, graph=MODES[graph]), requests)

    result = engine.generate(requests)

    assert {r.request_id: r.output_ids for r in result.requests} == generate(make_config(pair, "none"), requests)
    offered = [max(record.offered_per_round) for record in result.requests]
    assert offered == [0, 3, 1, 2, 0]
    is_plain = [record.rows.catchup_mlp == 0 for record in result.rounds]
    assert is_plain[-1] and not all(is_plain)
    plain = [record.rows for record, each in zip(result.rounds, is_plain, strict=True) if each]
    assert all(rows.verified <= 2 and rows.drafted == rows.offered == 0 for rows in plain)


def read(folder: Path, value: Any) -> int | None:
    path = folder / "p.jsonl"
    path.write_text(json.dumps({"prompt": "x", "num_draft_tokens": value}))
    return read_jsonl(part("workload", "jsonl", path=str(path)))[0].num_draft_tokens


def test_a_line_says_a_number_or_off(tmp_path: Path) -> None:
    assert [read(tmp_path, value) for value in (None, 2, 0, "off")] == [None, 2, 0, 0]
    for wrong in (-1, 17, "on", 1.5):
        with pytest.raises(ValueError):
            read(tmp_path, wrong)
