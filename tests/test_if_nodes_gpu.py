"""Stretches of a CUDA graph in IF nodes.

They have a file, and with it a process, of their own: where a capture was broken off, torch 2.11 still counts it as
under way, and aborts when the pool of an IF node's body is freed.
"""

from __future__ import annotations

import pytest
import torch

from spec_lab.engine.capture import CudaGraphRecorder

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def recorder(device: torch.device) -> CudaGraphRecorder:
    return CudaGraphRecorder(device)


def test_a_stretch_for_nobody_is_skipped(recorder: CudaGraphRecorder, device: torch.device) -> None:
    """Two of them, whose temporaries nothing else may take meanwhile; what a skipped one would have written stays."""
    if not recorder.skips:
        pytest.skip("this driver has no conditional nodes")
    slot_ids = torch.tensor([[3, 9], [9, 9]], device=device)
    x, kept = torch.randn(256, 256, device=device) / 16, torch.zeros(2, 256, 256, device=device)

    def function() -> torch.Tensor:
        kept.zero_()
        for index in range(2):
            with recorder.when_any(slot_ids[index], 9):
                kept[index].copy_((x @ x + index) @ x)
        return kept * 2

    graph = recorder.capture(function)
    assert graph.num_nodes is not None and graph.num_nodes >= 2 * 3 + 2
    for wanted in ([True, False], [False, False], [False, True], [True, True]):
        slot_ids.copy_(torch.tensor([[9, 5 if is_wanted else 9] for is_wanted in wanted], device=device))
        graph.replay()
        torch.full((256, 256), float("nan"), device=device)  # where a temporary would lie that was given back
        for index, is_wanted in enumerate(wanted):
            expected = ((x @ x + index) @ x) * 2 if is_wanted else torch.zeros_like(x)
            torch.testing.assert_close(graph.outputs[index], expected, rtol=1e-3, atol=1e-3)
