"""The kernel that says which requests go on behind a round, in a graph of several rounds."""

from __future__ import annotations

from pathlib import Path

from spec_lab.options.graphs import RoundGraph
from tests.graph_lab import make_lab, mixed_requests
from tests.kernel_lab import DEVICE, LaunchedKernels


def test_rounds_of_one_graph_end_alike(tmp_path: Path) -> None:
    lab = make_lab(lambda name: _made(tmp_path / name), DEVICE.type, eos_token_id=[2, 7, 11, 19])
    requests = mixed_requests(2, 3, longest=4)
    graph, texts = RoundGraph(rounds_per_replay=2), []
    with LaunchedKernels() as launched:
        for kernels in ("torch", "triton"):
            engine = lab.engine(requests, graph, num_draft_tokens=2, batch_size=2, kernels=kernels)
            texts.append([(r.output_ids, r.accepted_per_round) for r in engine.generate(requests).requests])
    assert texts[0] == texts[1] and "going_on" in launched.names


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
