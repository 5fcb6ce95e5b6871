"""A pruning from outside that goes by length: what the record counts is what was computed, in every mode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from spec_lab.config.extensions import load_options
from spec_lab.options.graphs import RoundGraph
from tests.lab import make_config, make_engine, make_pair, random_requests

BY_LENGTH = """
from spec_lab.config.option import option
from spec_lab.core.pruning_protocols import LayerRows
from spec_lab.core.selection import AfterAttention, AllRows
from spec_lab.options.pruning import CatchupOption

SEEN = []
COUNTED = []
LONG = 30

class ByLength:
    needs_prewrite = False

    def selection(self, live_rows, live_attention):
        if not READS:
            return AllRows(live_rows)
        SEEN.append(live_attention.seq_lens.tolist())
        is_long = int(live_attention.seq_lens.max()) >= LONG
        return AfterAttention(live_rows) if is_long else AllRows(live_rows)

    def num_computed(self, live_lens, num_rows):
        COUNTED.append(list(live_lens))
        every, live = len(live_lens) * num_rows, len(live_lens)
        return LayerRows(every, *((live, live) if max(live_lens) >= LONG else (every, every)))

@option("prune.catchup", NAME)
class ByLengthOption(CatchupOption):
    def build(self):
        return ByLength()
"""
GRAPHS = {
    "eager": None,
    "overlap": RoundGraph(overlap=True),
    "several": RoundGraph(rounds_per_replay=3),
    "several, overlap": RoundGraph(rounds_per_replay=3, overlap=True),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("graph", GRAPHS)
def test_lengths_are_those_that_the_selection_saw(
    graph: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"by_length_{tmp_path.name}"
    captures = GRAPHS[graph] is not None  # what is captured cannot be chosen by a length that the host reads
    (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}\nREADS = {not captures}\n{BY_LENGTH}")
    requests = random_requests(5, max_new_tokens=14, lengths=(8, 30))
    config = make_config(pair, "eagle3", batch_size=2, extensions=[name])
    load_options(config.extensions)
    config.prune.catchup = name
    config.graph = GRAPHS[graph] or config.graph
    engine = make_engine(config, requests)
    module: Any = sys.modules[name]
    result = engine.generate(requests)
    if not captures:
        assert module.SEEN[-len(module.COUNTED) :] == module.COUNTED
        assert {record.rows.catchup_mlp for record in result.rounds} >= {2, 8}, "some rounds are long, some not"
    lens = {request.request_id: len(request.prompt_ids) for request in requests}
    assert len(result.rounds) == len(module.COUNTED)
    for record, counted in zip(result.rounds, module.COUNTED, strict=True):
        for request_id, num_accepted in zip(record.request_ids, record.accepted, strict=True):
            lens[request_id] += num_accepted + 1
        running = [lens[request_id] for request_id in record.request_ids]
        assert sorted(counted)[-len(running) :] == sorted(running) or record.num_surplus
        assert len(counted) == engine.graph.padded_size(len(record.request_ids) + record.num_surplus)
        assert record.num_surplus or counted.count(1) == len(counted) - len(running)
