"""What a run cannot do of `prune` is a logged no-op, so that sweeps compose: the catch-up step of a block drafter in a
graph."""

from __future__ import annotations

from pathlib import Path

import pytest

import spec_lab

SHORT = ["device=cpu", "workload.limit=2", "max_new_tokens=12", "repeats=1", "warmup_requests=0", "profile_rounds=0"]


def test_a_block_drafter_in_a_graph_writes_all_rows_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pruned = ["prune.catchup=pre_attention", "prune.prefill=all_rows"]
    block = [*SHORT, "drafter=dflash", "drafter.num_draft_tokens=3", f"output_dir={tmp_path}", *pruned]
    results = {}
    for graph in ("round", "eager"):
        results[graph] = spec_lab.run(spec_lab.compose([*block, f"graph={graph}"])).run
        said = "prune.catchup=pre_attention has nothing to prune" in capsys.readouterr().err
        assert said == (graph == "round")
    assert "unpruned" not in results["round"].references and "unpruned" in results["eager"].references
    rounds = results["round"]["rounds"]
    assert results["eager"]["rounds"] == rounds
    for part in ("attention", "output", "mlp"):
        computed = {graph: result[f"rows.catchup_{part}"] for graph, result in results.items()}
        assert computed["round"] == 4 * rounds > computed["eager"]
