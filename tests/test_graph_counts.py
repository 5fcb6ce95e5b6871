"""What is counted of a round: launches, replays, synchronisations, busy time; and that a fallback fails the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spec_lab.config.groups import GraphConfig
from spec_lab.config.run import Run
from spec_lab.core.results import RoundRecord
from spec_lab.core.types import Verification
from spec_lab.engine import timing
from spec_lab.engine.engine import Engine
from spec_lab.engine.graphs.captured import CapturedMode
from spec_lab.engine.readback import read_later
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.timing import CudaEventTimer, HostTimer
from spec_lab.measure import runner
from spec_lab.measure.launch_counts import CountedRounds, count_trace
from spec_lab.measure.profiling import profile_rounds
from spec_lab.measure.watched_rounds import watch_rounds
from spec_lab.options.graphs import FullLoop, RoundGraph
from spec_lab.record.reading import read_run
from spec_lab.record.trace import STAGE_PREFIX, TraceEvent, outermost
from tests import graph_lab
from tests.fake_runs import CHOICES
from tests.lab import make_config, make_engine, random_requests
from tests.test_runner_passes import num_stages
from tests.tiny_runs import make_run_config, write_prompts

MODES: dict[str, GraphConfig | None] = {"eager": None, **graph_lab.MODES}
del MODES["verify_eager"]
NUM_ROUNDS = 3


def span(name: str, start: float, end: float, on_device: bool = False) -> TraceEvent:
    return TraceEvent(STAGE_PREFIX + name, start, end, on_device, is_span=True)


def kernel(start: float, end: float) -> TraceEvent:
    return TraceEvent("a_kernel", start, end, on_device=True)


def test_a_trace_counts_inside_spans_once_a_piece_of_work() -> None:
    """Two rounds: a call between them does not count, nor a driver call made by the runtime call around it."""
    launch, sync = "cudaLaunchKernel", "cudaStreamSynchronize"
    events = [
        span("round", 0, 100), span("verify", 10, 40), span("round", 200, 300), span("commit", 320, 330),
        span("verify", 15, 90, on_device=True),
        TraceEvent(launch, 11, 14), TraceEvent("cuLaunchKernel", 12, 13), TraceEvent(launch, 20, 22),
        TraceEvent(launch, 150, 152), TraceEvent(sync, 160, 170), TraceEvent("cudaGraphLaunch", 210, 215),
        TraceEvent(sync, 325, 328), TraceEvent(launch, 400, 402),
    ]  # fmt: skip
    work = count_trace(events, num_rounds=2, num_replays=1)
    assert work["launches_per_round"] == 3 / 2
    assert work["host_syncs_per_round"] == 1 / 2
    assert work["replays_per_round"] == 1 / 2
    assert work["gpu_busy_ms_per_round"] == 0


def test_of_calls_that_begin_at_once_the_longest_is_the_outermost() -> None:
    """The profiler's clock may give a driver's call the start of the call around it."""
    call, inner, later = (TraceEvent("cuda", *ends) for ends in ((1, 9), (1, 3), (4, 6)))
    assert outermost([inner, later, call]) == [call]


def test_busy_time_is_the_union_of_what_runs_at_once() -> None:
    events = [kernel(0, 1000), kernel(500, 1500), kernel(600, 700), kernel(3000, 3500), span("round", 0, 9000, True)]
    assert count_trace(events, num_rounds=2, num_replays=0)["gpu_busy_ms_per_round"] == pytest.approx(1.0)


def a_round(timer: CountedRounds, x: torch.Tensor, weight: torch.Tensor) -> None:
    """A round of seven launches, one of them a replay of two more operators, and two reads."""
    with timer.round():
        ids = torch.tensor([1, 2])  # an upload
        with timer.span("verify"):
            rows = F.linear(x.view(2, 4), weight)  # one product, whose transpose is a view
        rows[:, 0] = 0
        torch.empty(3)
        assert rows.reshape(8).numel() == 8
        rows.add_(1).unsqueeze(0).expand(2, 2, 4)
        with timer.replay("draft", []):
            (rows * 2).sum()
    rows * 3  # in no span
    with timer.span("commit"):
        torch.cat([rows, rows]).tolist()
        assert int(ids.sum()) == 3


def test_operators_replays_and_reads_are_counted_exactly() -> None:
    """Of five rounds the second and the third are counted."""
    timer = CountedRounds(num_skipped=1, num_launches=2)
    x, weight = torch.ones(8), torch.ones(4, 4)
    with torch.inference_mode():
        for _ in range(5):
            a_round(timer, x, weight)
    work = timer.work()
    assert timer.num_rounds == 2 and work is not None
    assert work["launches_per_round"] == 7
    assert work["replays_per_round"] == 1
    assert work["host_syncs_per_round"] == 2
    assert work["gpu_busy_ms_per_round"] is None


def engine_of(pair: tuple[Path, Path], mode: str) -> tuple[Engine, list[Any]]:
    requests = random_requests(2, 40, lengths=(1, 12))
    config = make_config(pair, "eagle3", 3, "catchup", batch_size=2)
    config.graph = MODES[mode] or config.graph
    return make_engine(config, requests), requests


@pytest.fixture(scope="module")
def counted(pair: tuple[Path, Path]) -> dict[str, tuple[Any, dict[str, int | None]]]:
    """The counted work a round, and the nodes of the graphs, by mode."""
    found = {}
    for mode in MODES:
        engine, requests = engine_of(pair, mode)
        work = watch_rounds(engine, requests, NUM_ROUNDS, CountedRounds).work()
        assert work is not None
        found[mode] = (work, engine.graph.counts.nodes)
    return found


def test_each_mode_launches_less_than_the_one_before(counted: dict[str, Any]) -> None:
    launches = [counted[mode][0]["launches_per_round"] for mode in MODES if mode != "overlap"]
    assert launches == sorted(launches, reverse=True) and len(set(launches)) == len(launches)
    replays = {mode: work["replays_per_round"] for mode, (work, _) in counted.items()}
    assert replays == {"eager": 0, "split_seed": 2, "step_replay": 4, "full_loop": 2, "round": 1, "overlap": 1}


def test_every_mode_reads_once_a_round(counted: dict[str, Any]) -> None:
    assert {work["host_syncs_per_round"] for work, _ in counted.values()} == {1.0}


@pytest.mark.parametrize("mode", ["round", "overlap"])
def test_a_captured_round_is_one_replay(mode: str, counted: dict[str, Any]) -> None:
    """Behind it the results are packed; slot ids go up only when they change. Eager sends them with all nodes."""
    work, nodes = counted[mode]
    assert work["launches_per_round"] == 2
    assert counted["eager"][0]["launches_per_round"] == nodes["round"] + 2


def test_replays_are_named_in_the_trace(pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine, requests = engine_of(pair, "step_replay")
    replays = {"verify": 1, "catchup": 1, "recur": 2}
    profile = profile_rounds(engine, requests, NUM_ROUNDS, tmp_path)
    stages = num_stages(tmp_path)
    assert {name: stages[f"replay {name}"] for name in replays} == {k: NUM_ROUNDS * n for k, n in replays.items()}
    assert stages["accept"] == stages["round"] == NUM_ROUNDS
    assert profile.work is not None and profile.work["replays_per_round"] == sum(replays.values())


@pytest.mark.parametrize("mode", ["eager", "overlap"])
def test_the_cpu_span_ends_before_the_results_are_read(
    mode: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that stands still but for a replay or an accept (3 s) and a read (100 s)."""
    engine, requests = engine_of(pair, mode)
    clock = 0.0

    def advance(by: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            nonlocal clock
            clock += by
            return function(*args)

        return slow

    class Slow:
        def __init__(self, verification: Verification) -> None:
            self.read = advance(100, read_later(verification).read)

    monkeypatch.setattr("spec_lab.engine.engine.perf_counter", lambda: clock)
    monkeypatch.setattr("spec_lab.engine.engine.read_later", Slow)
    monkeypatch.setattr(engine.graph, "run", advance(3, engine.graph.run))
    rounds: list[RoundRecord] = engine.generate(requests).rounds
    assert {record.launch_seconds for record in rounds} == {3}
    assert min(record.seconds for record in rounds[1:]) >= 100


@pytest.mark.parametrize("relaxed", [None, torch.tensor([[0, 1], [0, 0]])])
def test_results_are_read_as_they_were(relaxed: torch.Tensor | None) -> None:
    """They are, also when the next replay has overwritten them."""
    verification = Verification(torch.tensor([[5, 6, 7], [8, 9, 1]]), torch.tensor([3, 1]), relaxed)
    pending = read_later(verification)
    verification.tokens.zero_()
    result = pending.read()
    assert (result.tokens, result.num_emitted) == ([[5, 6, 7], [8, 9, 1]], [3, 1])
    assert result.relaxed == (None if relaxed is None else [[0, 1], [0, 0]])


class FakeEvent:
    """A CUDA event on a counter of milliseconds; one recorded at -1 cannot be read."""

    now = 0.0

    def __init__(self, **options: Any) -> None:
        self.is_external = options["external"]
        self.at: float | None = None

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        """Return at once: the work is done."""

    def elapsed_time(self, end: FakeEvent) -> float:
        if self.at is None or end.at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return end.at - self.at


@pytest.fixture
def event_timer(monkeypatch: pytest.MonkeyPatch) -> CudaEventTimer:
    monkeypatch.setattr(timing.torch.cuda, "Event", FakeEvent)
    FakeEvent.now = 0.0
    return CudaEventTimer()


def captured_marks(timer: CudaEventTimer, *names: str) -> list[Any]:
    """The marks of a graph that no replay has recorded yet."""
    with timer.capture() as marks:
        for name in names:
            with timer.span(name):
                pass
    for mark in marks:
        assert mark.start.is_external and mark.end.is_external
        mark.start.at = mark.end.at = None
    return list(marks)


def test_a_stage_that_cannot_be_read_has_no_time(event_timer: CudaEventTimer) -> None:
    """The replay did not record one mark, and the end of another is of the replay before."""
    marks = captured_marks(event_timer, "verify", "accept", "recur", "recur")
    FakeEvent.now = 10.0
    marks[1].end.record()
    FakeEvent.now = 20.0
    with event_timer.round(), event_timer.replay("graph", marks):
        marks[1].start.record()
        marks[2].start.record()
        marks[2].end.record()
    assert event_timer.collect(event_timer.spans) == [{}]


def test_stages_of_rounds_in_one_graph_are_told_apart(event_timer: CudaEventTimer) -> None:
    """What lies around them they share; those of a round that ran for nobody are left out."""
    with event_timer.capture() as marks:
        for index in range(3):
            with event_timer.inner_round(index):
                for name in ("verify", "recur"):
                    with event_timer.span(name):
                        pass
    with event_timer.round(3):
        with event_timer.replay("graph", marks):
            for number, mark in enumerate(marks):
                mark.start.record()
                FakeEvent.now += 1.0 + number
                mark.end.record()
        with event_timer.span("readback"):
            FakeEvent.now += 8.0
    first, second = event_timer.collect(event_timer.spans, 2)
    assert first == {"verify": pytest.approx(1e-3), "recur": pytest.approx(2e-3), "readback": pytest.approx(4e-3)}
    assert second == {"verify": pytest.approx(3e-3), "recur": pytest.approx(4e-3), "readback": pytest.approx(4e-3)}


def test_a_stretch_that_may_hold_no_marks_has_none(event_timer: CudaEventTimer) -> None:
    with event_timer.capture() as marks:
        with event_timer.span("verify"):
            pass
        with event_timer.unmarked(), event_timer.inner_round(1), event_timer.span("verify"):
            pass
    assert [(mark.name, mark.round_index) for mark in marks] == [("verify", None)]


def test_the_hosts_clock_times_no_stretch_without_marks() -> None:
    """Such as a prompt pass, whose spans belong to no round."""
    timer = HostTimer()
    with timer.round():
        with timer.span("verify"):
            pass
        with timer.unmarked(), timer.span("head"):
            pass
        with timer.span("commit"):
            pass
    assert list(timer.spans) == ["verify", "commit"]


@pytest.fixture
def configure(pair: tuple[Path, Path], tmp_path: Path) -> Run:
    prompts = [{"id": f"r{index}", "prompt": "abcabc"[index:], "form": "continue"} for index in range(2)]
    config = make_run_config(pair, write_prompts(tmp_path / "prompts.jsonl", prompts), references=["plain"])
    config.graph = FullLoop()
    return config


def test_a_captured_run_records_its_counts(configure: Run, tmp_path: Path) -> None:
    configure.profile_rounds = 1
    summary = runner.record_run(configure, CHOICES, tmp_path / "run")
    assert summary["graph.captures"] == 2
    assert set(summary.under("graph.nodes")) == {"verify", "draft"}
    assert set(summary.references["plain"].under("graph.nodes")) == {"verify"}
    assert summary["replays_per_round"] == 2 and summary["host_syncs_per_round"] == 1
    assert summary["gpu_busy_ms_per_round"] is summary["gpu_idle_share"] is None
    assert summary["launch_ms"] is not None and summary["round_ms"] is not None
    assert 0 < summary["launch_ms"] < summary["round_ms"]
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert 0 < line["launch_seconds"] < line["seconds"]


def test_a_run_of_several_rounds_a_replay_records_them(configure: Run, tmp_path: Path) -> None:
    """Those that were wasted have no line; with the lines they are what was replayed."""
    configure.graph = RoundGraph(rounds_per_replay=4)
    configure.profile_rounds = 3
    summary = runner.record_run(configure, CHOICES, tmp_path / "run")
    assert summary["graph.rounds_per_replay"] == 4 and set(summary.under("graph.nodes")) == {"rounds"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["repeat"] == 0]
    assert summary["verify_calls"] == len(first) and (len(first) + summary["wasted_rounds"]) % 4 == 0
    assert summary["wasted_rounds"] > 0 and summary.references["plain"]["wasted_rounds"] >= 0
    assert summary["divergence.diverged"] == 0
    assert summary["replays_per_round"] == pytest.approx(1 / 4)


def test_rounds_that_run_eagerly_fail_the_run(configure: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(mode: CapturedMode, decode_round: DecodeRound, slots: list[int], max_kv_len: int) -> Verification:
        return decode_round.run(decode_round.load(decode_round.parts.slots.ids(slots, len(slots)), max_kv_len))

    monkeypatch.setattr(CapturedMode, "run", run)
    with pytest.raises(RuntimeError, match="replayed 0 times"):
        runner.record_run(configure, CHOICES, tmp_path / "run")
    summary = read_run(tmp_path / "run")
    assert summary.status == "failed"
    assert summary.reason is not None and "graph=full_loop replayed 0 times" in summary.reason
