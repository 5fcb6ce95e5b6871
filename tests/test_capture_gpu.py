"""CUDA graphs behind the same contract as the tape."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spec_lab.engine.capture import CaptureError, CudaGraphRecorder

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def recorder(device: torch.device) -> CudaGraphRecorder:
    return CudaGraphRecorder(device)


def test_outputs_are_rewritten_in_place(recorder: CudaGraphRecorder, device: torch.device) -> None:
    x, weight = torch.zeros(4, 64, device=device), torch.randn(64, 64, device=device)

    def function() -> tuple[torch.Tensor, torch.Tensor]:
        rows = F.silu(F.linear(x, weight))
        return rows, rows.argmax(dim=-1)

    graph = recorder.capture(function)
    addresses = [tensor.data_ptr() for tensor in graph.outputs]
    for seed in range(3):
        x.copy_(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        rows, best = function()
        assert torch.equal(graph.outputs[0], rows) and torch.equal(graph.outputs[1], best)
    assert [tensor.data_ptr() for tensor in graph.outputs] == addresses


def test_capturing_executes_nothing_beyond_the_warm_ups(device: torch.device) -> None:
    counter = torch.zeros(3, device=device)
    graph = CudaGraphRecorder(device, num_warmups=2).capture(lambda: counter.add_(1))
    assert counter.tolist() == [2, 2, 2]
    graph.replay()
    assert counter.tolist() == [3, 3, 3] and graph.outputs is counter


def test_nodes_are_kernels_and_copies(recorder: CudaGraphRecorder, device: torch.device) -> None:
    """Three launches and a copy between buffers, whatever events are recorded in between."""
    x, kept = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]

    def function() -> torch.Tensor:
        events[0].record()
        y = (x + 1) * 2
        kept.copy_(y)
        events[1].record()
        return y.exp()

    assert recorder.capture(function).num_nodes == 4


def test_graphs_of_one_pool_keep_their_outputs(recorder: CudaGraphRecorder, device: torch.device) -> None:
    """Temporaries are shared, but what is put out survives the graphs that were captured later."""
    x = torch.ones(1 << 20, device=device)
    first = recorder.capture(lambda: (x * 2 + 1) * 3)
    second = recorder.capture(lambda: (x * 5 + 2) * 7)
    first.replay()
    second.replay()
    assert first.outputs.eq(9).all() and second.outputs.eq(49).all()
    x.fill_(2)
    first.replay()
    assert first.outputs.eq(15).all()
    second.replay()
    assert first.outputs.eq(15).all() and second.outputs.eq(84).all()


def test_what_a_graph_reads_outlives_its_maker(recorder: CudaGraphRecorder, device: torch.device) -> None:
    def make() -> Callable[[], torch.Tensor]:
        weight = torch.full((1 << 20,), 3.0, device=device)
        return lambda: weight * 2

    graph = recorder.capture(make())
    gc.collect()
    junk = [torch.full((1 << 20,), -1.0, device=device) for _ in range(8)]
    graph.replay()
    assert graph.outputs.eq(6).all() and junk


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "upload": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_failed_capture_is_readable_and_harmless(
    recorder: CudaGraphRecorder, device: torch.device, case: str
) -> None:
    """It names the place and the first cause, and the same recorder captures the next function."""
    x = torch.ones(8, device=device)
    with pytest.raises(CaptureError) as refusal:
        recorder.capture(lambda: REFUSED[case](x))
    assert f"{__file__}:{REFUSED[case].__code__.co_firstlineno}" in str(refusal.value)
    assert "graph=eager" in str(refusal.value)
    graph = recorder.capture(lambda: x + 1)
    graph.replay()
    assert graph.outputs.eq(2).all()


def test_an_error_of_the_function_is_its_own(recorder: CudaGraphRecorder, device: torch.device) -> None:
    x = torch.ones(2, 3, device=device)
    calls = []

    def function() -> torch.Tensor:
        calls.append(1)
        return x @ x if len(calls) == 3 else x

    with pytest.raises(CaptureError, match="shapes cannot be multiplied"):
        recorder.capture(function)


@pytest.mark.parametrize("error", [AssertionError, KeyError, KeyboardInterrupt])
def test_a_capture_that_python_ends_is_harmless(
    recorder: CudaGraphRecorder, device: torch.device, error: type[BaseException]
) -> None:
    """The error is the function's own, and the same recorder captures the next function."""
    x = torch.ones(1 << 20, device=device)

    def function() -> torch.Tensor:
        y = x * 2
        if torch.cuda.is_current_stream_capturing():
            raise error("in the middle")
        return y

    with pytest.raises(error, match="in the middle"):
        recorder.capture(function)
    graph = recorder.capture(lambda: x * 3)
    graph.replay()
    assert graph.outputs.eq(3).all()
