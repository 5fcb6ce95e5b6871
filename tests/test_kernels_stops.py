"""The kernel that says which requests go on behind a round, against its reference and in a graph of several rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_kernels.stops import going_on
from spec_kernels.stops_reference import going_on_reference
from spec_lab.options.graphs.round import RoundGraphConfig
from tests.graph_lab import make_lab, mixed_requests
from tests.kernel_lab import DEVICE
from tests.test_kernels_wiring import LaunchedKernels

NUM_SLOTS = 6


def draw(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape).to(DEVICE)


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("ends", [[], [3], [3, 5, 0], list(range(9))])
@pytest.mark.parametrize(("batch", "num_rows"), [(1, 1), (6, 4), (8, 7)])
def test_it_ends_whom_the_reference_ends(batch: int, num_rows: int, ends: list[int], only_last: bool) -> None:
    """Tokens of a small vocabulary, lengths about the limits, rows that emitted nothing, several padded rows."""
    torch.manual_seed(batch)
    eos = torch.tensor(ends, dtype=torch.int64, device=DEVICE)
    kv_lens, end_lens, heeds_eos = draw(3, 9, NUM_SLOTS + 1), draw(6, 14, NUM_SLOTS + 1), draw(0, 2, NUM_SLOTS + 1)
    kv_lens[-1] = end_lens[-1] = 0
    slot_ids = torch.cat((torch.randperm(NUM_SLOTS)[:batch], torch.full((max(batch - NUM_SLOTS, 0),), NUM_SLOTS)))
    tokens, num_emitted = draw(0, 12, batch, num_rows), draw(0, num_rows + 1, batch)
    inputs = slot_ids.to(DEVICE), tokens, num_emitted, kv_lens, end_lens, heeds_eos, eos, only_last
    expected = going_on_reference(*inputs)
    assert torch.equal(going_on(*inputs), expected)
    if batch == 6 and len(ends) == 3:
        assert 0 < int((expected == NUM_SLOTS).sum()) < batch


@pytest.mark.slow
def test_rounds_of_one_graph_end_alike(tmp_path: Path) -> None:
    lab = make_lab(lambda name: _made(tmp_path / name), DEVICE.type, eos_token_id=[2, 7, 11, 19])
    requests = mixed_requests(2, 5, longest=4)
    graph, texts = RoundGraphConfig(rounds_per_replay=2), []
    with LaunchedKernels() as launched:
        for kernels in ("torch", "triton"):
            engine = lab.engine(requests, graph, num_draft_tokens=2, batch_size=2, kernels=kernels)
            texts.append([(r.output_ids, r.accepted_per_round) for r in engine.generate(requests).requests])
    assert texts[0] == texts[1] and "going_on" in launched.names


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
