"""Stretches of a CUDA graph in IF nodes.

They have a file, and with it a process, of their own: where a capture was broken off, torch 2.11 still counts it as
under way, and aborts when the pool of an IF node's body is freed.
"""

from __future__ import annotations

from contextlib import ExitStack

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


def test_stretches_stand_in_one_another(recorder: CudaGraphRecorder, device: torch.device) -> None:
    """Four of them, each with the condition that the one around it leaves: as many run as are asked for, and what one
    hands to the next lies in its own memory."""
    if not recorder.skips:
        pytest.skip("this driver has no conditional nodes")
    left, ran = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(4, 64, 64, device=device)
    x = torch.randn(64, 64, device=device) / 8

    def function() -> torch.Tensor:
        ran.zero_()
        handed = x
        with ExitStack() as stretches:
            for index in range(4):
                stretches.enter_context(recorder.when_any(left, 0))
                handed = (handed @ x) @ x
                ran[index].copy_(handed)
                left.sub_(1)
        return ran * 2

    graph = recorder.capture(function)
    assert graph.num_nodes is not None and graph.num_nodes >= 4 * 4 + 2
    for wanted in (2, 0, 4, 1, 3):
        left.fill_(wanted)
        graph.replay()
        torch.full((64, 64), float("nan"), device=device)
        handed = x
        for index in range(4):
            handed = (handed @ x) @ x
            expected = handed * 2 if index < wanted else torch.zeros_like(x)
            torch.testing.assert_close(graph.outputs[index], expected, rtol=1e-3, atol=1e-3)
