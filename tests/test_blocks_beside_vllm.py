"""The comparison of block drafters with vLLM's, where the lab stands in for vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench_modules import imported


@pytest.mark.parametrize("name", ["dspark-speculators", "p_eagle-speculators"])
def test_drafts_of_the_same_files_are_compared_round_by_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A draft that differs is one of all drafts, also behind a round that accepted less."""
    with imported("blocks_beside_vllm", monkeypatch) as module:
        for number, value in {"NUM_PROMPTS": 2, "NUM_TOKENS": 12}.items():
            monkeypatch.setattr(module, number, value)
        module.ours(tmp_path, name)
        texts = json.loads((tmp_path / name / module.OURS).read_text())["texts"]
        for text in texts:
            proposed = list(text["drafts"].values())
            assert [str(start) for start, _ in module.rounds(text["tokens"], proposed)] == list(text["drafts"])
        num_rounds = sum(int(start) < 12 for text in texts for start in text["drafts"])
        texts[0]["drafts"]["1"][-1] += 1
        (tmp_path / name / module.THEIRS).write_text(json.dumps({"texts": texts}))
        line = module.table(tmp_path, [name]).splitlines()[1].split(", ")
    assert line[1:6] == ["2 of 2", *map(str, (num_rounds, 7 * num_rounds, 7 * num_rounds - 1, num_rounds - 1))]
