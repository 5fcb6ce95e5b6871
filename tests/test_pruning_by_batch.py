"""A pruning from outside that goes by the size of the batch: what the record counts is what was computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.config.extensions import load_options
from spec_lab.options.graphs import RoundGraph
from tests.lab import make_config, make_engine, random_requests
from tests.layer_rows import count_rows

BY_BATCH = """
from spec_lab.config.option import option
from spec_lab.core.kept import Drop

@option("prune.catchup", NAME)
class ByBatch:
    def build(self):
        return lambda num_requests: Drop.AFTER_ATTENTION if num_requests >= 2 else Drop.AFTER_LAYER
"""


@pytest.mark.parametrize("graph", ["eager", "round"])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_rows_are_dropped_and_counted_by_the_batch(
    graph: str, kernels: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of no pruning; eager rounds in torch compute the rows that are counted."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"by_batch_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}\n{BY_BATCH}")
    requests = [
        replace(request, ignore_eos=True, max_new_tokens=length)
        for request, length in zip(random_requests(3, max_new_tokens=14), (4, 8, 14), strict=True)
    ]
    config = make_config(pair, "eagle3", batch_size=3, kernels=kernels, extensions=[name])
    plain = make_engine(config, requests).generate(requests)
    load_options(config.extensions)
    config.prune.catchup = name
    if graph == "round":
        config.graph = RoundGraph()
    engine = make_engine(config, requests)
    head: Any = engine.parts.drafter
    rows = count_rows(head.head.layer) if (graph, kernels) == ("eager", "torch") else None
    result = engine.generate(requests)
    assert [record.output_ids for record in result.requests] == [record.output_ids for record in plain.requests]
    for record in result.rounds:
        padded = engine.graph.padded_size(len(record.request_ids))
        mlp = padded if padded >= 2 else 4
        assert (record.rows.catchup_attention, record.rows.catchup_mlp) == (4 * padded, mlp)
    assert {len(record.request_ids) for record in result.rounds} >= {1, 2}
    if rows is not None:
        steps = sum(2 * len(record.request_ids) for record in result.rounds)
        in_prompts = sum(len(request.prompt_ids) for request in requests) + 2 * len(requests)
        assert sum(rows.mlp) == sum(record.rows.catchup_mlp for record in result.rounds) + steps + in_prompts
