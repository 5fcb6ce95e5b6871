"""Counting and stage times on a real trace and in a real graph."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.profiler import profile

from spec_lab.engine.capture import CudaGraphRecorder
from spec_lab.engine.timing import CudaEventTimer
from spec_lab.measure.launch_counts import count_trace
from spec_lab.measure.profiling import ProfiledRounds, read_trace

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_profiled_round_has_its_launches_syncs_and_busy_time(device: torch.device) -> None:
    """A kernel, a graph of two and a blocking copy a round; what happens between rounds does not count."""
    x = torch.ones(1 << 20, device=device)
    graph = CudaGraphRecorder(device).capture(lambda: (x * 2 + 1)[:4])
    profiler = profile(use_device="cuda", use_kineto=True)
    rounds = ProfiledRounds(profiler, num_skipped=1, num_launches=2)
    for _ in range(4):
        with rounds.round():
            x.add_(1)
            with rounds.replay("draft", []):
                graph.replay()
        with rounds.span("commit"):
            graph.outputs.tolist()
        x.mul_(1)
    rounds.end()
    work = count_trace(read_trace(profiler), rounds.num_rounds, rounds.num_replays)
    assert (work["launches_per_round"], work["host_syncs_per_round"], work["replays_per_round"]) == (3, 1, 1)
    busy = work["gpu_busy_ms_per_round"]
    assert busy is not None and 0 < busy < 10


def test_stages_of_a_graph_are_timed_at_each_replay(device: torch.device) -> None:
    """The second of two stages has a hundred times the work; a stage replayed twice counts twice."""
    timer = CudaEventTimer()
    x = torch.ones(1 << 24, device=device)
    recorder = CudaGraphRecorder(device)

    def function() -> None:
        marks.clear()
        with timer.span("verify"):
            x.add_(1)
        with timer.span("recur"):
            for _ in range(100):
                x.add_(1)

    with timer.capture() as marks:
        graph = recorder.capture(function)
    found = []
    for num_replays in (1, 1, 2):
        with timer.round():
            for _ in range(num_replays):
                with timer.replay("graph" if num_replays == 1 else "again", marks if num_replays == 1 else []):
                    graph.replay()
        found.extend(timer.collect(timer.spans))
    for seconds in found[:2]:
        assert seconds["recur"] > 10 * seconds["verify"] > 0
    assert found[2]["again"] > 1.5 * found[1]["recur"]


def test_stages_of_rounds_in_one_graph_are_timed_apart(device: torch.device) -> None:
    """The second of two rounds has a hundred times the work; what lies around them is shared."""
    timer = CudaEventTimer()
    x = torch.ones(1 << 24, device=device)

    def function() -> None:
        marks.clear()
        for index, num_passes in enumerate((1, 100)):
            with timer.inner_round(index), timer.span("verify"):
                for _ in range(num_passes):
                    x.add_(1)

    with timer.capture() as marks:
        graph = CudaGraphRecorder(device).capture(function)
    for _ in range(2):
        with timer.round(2):
            with timer.replay("graph", marks):
                graph.replay()
            with timer.span("readback"):
                x.add_(1)
        first, second = timer.collect(timer.spans, 2)
        assert second["verify"] > 10 * first["verify"] > 0 and first["readback"] == second["readback"] > 0
        assert timer.collect(timer.spans, 1)[0]["readback"] == pytest.approx(2 * first["readback"])
