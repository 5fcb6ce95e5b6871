"""What a run cannot do of `prune` is a logged no-op, so that sweeps compose: prompts of a backend that writes KV with
attention, and the catch-up step of a block drafter in a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spec_lab
from spec_lab.attention.torch_backend import TorchAttention
from tests.lab import Reference, make_config, make_engine, make_pair, random_requests

SHORT = ["device=cpu", "workload.limit=2", "max_new_tokens=12", "repeats=1", "warmup_requests=0", "profile_rounds=0"]


@pytest.fixture
def writes_with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose keys and values are in the cache once as many rows as were written have attended."""
    write, attend = TorchAttention.write, TorchAttention.attend
    waiting: list[Any] = []

    def defer(self: TorchAttention, cache: Any, metadata: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert not waiting, "rows that were written did not attend"
        waiting.append((cache, metadata, keys, values, len(keys)))

    def write_and_attend(self: TorchAttention, queries: torch.Tensor, cache: Any, metadata: Any, *rest: Any) -> Any:
        if waiting:
            of_cache, of_rows, keys, values, num_left = waiting.pop()
            assert of_cache is cache, "another layer attends"
            write(self, cache, of_rows, keys, values)
            if num_left > len(queries):  # the next chunk of a ragged forward
                waiting.append((cache, of_rows, keys, values, num_left - len(queries)))
        return attend(self, queries, cache, metadata, *rest)

    monkeypatch.setattr(TorchAttention, "prewrite", False)
    monkeypatch.setattr(TorchAttention, "write", defer)
    monkeypatch.setattr(TorchAttention, "attend", write_and_attend)


@pytest.mark.usefixtures("writes_with_attention")
@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
def test_post_attention_prunes_the_catch_up_step_where_kv_is_written_with_attention(
    drafter: str, tmp_path: Path
) -> None:
    """Prompts of several chunks: every row attends, and has logits. Of the catch-up step one row a request goes on."""
    pair = make_pair(tmp_path)
    requests = random_requests(3, 8)
    if drafter == "draft_model":
        pair = (pair[0], pair[0])
    config = make_config(pair, drafter, prune="post_attention", batch_size=2, cache={"prefill_chunk": 16})
    result = make_engine(config, requests).generate(requests)
    reference = Reference(pair[0])
    assert [record.output_ids for record in result.requests] == [reference.greedy(request) for request in requests]
    for record in result.rounds:
        assert record.rows.catchup_output == record.rows.catchup_mlp == record.rows.catchup_live > 0
        assert record.rows.catchup_attention > record.rows.catchup_live
    rows = [prefill.rows.prefill_logits for prefill in result.prefills]
    assert sum(rows) == sum(len(request.prompt_ids) for request in requests)


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
