"""The table of graph modes: which runs are compared, what its cells say, and that a change of acceptance shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import compose, conf_folder
from spec_lab.core.results import GenerationResult, GraphCounts
from spec_lab.menu.refusals.run import refusals
from spec_lab.record.measured import Measured
from spec_lab.record.runs import Run
from spec_lab.record.schema import RoundWork
from spec_lab.record.summary import build_summary
from spec_lab.report.graph_table import (
    format_graph_comparison,
    plotted_times,
    read_graph_comparisons,
    time_to_eager,
)
from spec_lab.report.known_options import GRAPH_MODES, describe_mode
from tests.fake_runs import make_info, make_request, make_round

ROUND = {"name": "round", "overlap": False, "metadata": "in_place"}
LOOP = {"name": "full_loop", "verify": True, "metadata": "in_place"}


def fake_repeats(graph: dict[str, Any], times: list[float], accepted: int = 2) -> list[GenerationResult]:
    repeats = []
    for time in times:
        rounds = [make_round([accepted + 1], time / 1e3) for _ in range(4)]
        for record in rounds:
            record.launch_seconds = record.seconds / 2
        counts = GraphCounts(mode=graph["name"], captures=3, replays=40, nodes={"verify": 70, "draft": None})
        repeats.append(GenerationResult([make_request("r0", [accepted] * 4)], rounds, [], counts, 3, 1.0))
    return repeats


def fake_run(
    graph: dict[str, Any],
    times: list[float],
    batch_size: int = 1,
    accepted: int = 2,
    eager: list[float] | None = None,
    **changes: Any,
) -> Run:
    """A made-up run whose repeat i takes `times[i]` milliseconds a round; half of each is the host's.

    Args:
        eager: what the repeats of the same run take eager, which takes turns with it.
    """
    repeats = fake_repeats(graph, times, accepted)
    references = {} if eager is None else {"eager": Measured(fake_repeats({"name": "eager"}, eager, accepted))}
    work = RoundWork(
        launches_per_round=12.0, replays_per_round=2.0, host_syncs_per_round=1.0, gpu_busy_ms_per_round=times[0] / 4
    )
    config = {"graph": graph, "batch_size": batch_size, "seed": 0, **changes}
    summary = build_summary(make_info(config), Measured(repeats), references, seconds=1.0, work=work)
    return Run(Path(f"{graph['name']}-{batch_size}"), summary)


def test_runs_that_differ_in_more_than_the_mode_are_not_compared() -> None:
    eager = fake_run({"name": "eager"}, [4.0])
    others = [fake_run(LOOP, [2.0], seed=1), fake_run(LOOP, [2.0], batch_size=16), fake_run(LOOP, [2.0], num_threads=2)]
    assert read_graph_comparisons([eager, *others]) == []
    assert read_graph_comparisons([fake_run(LOOP, [2.0]), eager]) != []


def test_modes_stand_by_batch_size_in_the_order_of_what_they_capture() -> None:
    graphs = [ROUND | {"overlap": True}, ROUND, LOOP, {"name": "eager"}]
    runs = [
        fake_run(graph, [2.0], batch_size, seed=seed) for seed in (1, 2) for batch_size in (16, 1) for graph in graphs
    ]
    comparisons = read_graph_comparisons(runs)
    assert len(comparisons) == 2
    cells = [(r.summary["config"]["batch_size"], describe_mode(r.summary)) for r in comparisons[0]]
    modes = ["eager", "full_loop", "round", "round, overlap"]
    assert cells == [(batch_size, mode) for batch_size in (1, 16) for mode in modes]


def test_a_failed_run_is_not_compared() -> None:
    failed = fake_run(LOOP, [2.0])
    failed.summary["status"] = "failed"
    assert read_graph_comparisons([fake_run({"name": "eager"}, [4.0]), failed]) == []


def test_the_ratio_is_over_the_eager_run_of_the_same_turns() -> None:
    """The machine slows down fourfold from turn to turn, and in each the captured round takes half."""
    ratio = time_to_eager(fake_run(LOOP, [2.0, 8.0, 32.0], eager=[4.0, 16.0, 64.0]).summary)
    assert ratio is not None and ratio.interval == pytest.approx((0.5, 0.5))
    assert time_to_eager(fake_run(LOOP, [2.0, 1.0, 4.0]).summary) is None, "another folder's turns are no pairs"


def test_the_figure_has_what_a_round_takes_over_eager() -> None:
    eager = {"name": "eager"}
    captured_runs = [fake_run(ROUND, [1.0, 1.0, 1.0], eager=[2.0, 3.0, 4.0]), fake_run(LOOP, [1.0], eager=[2.0])]
    [runs] = read_graph_comparisons([fake_run(eager, [2.0, 4.0]), *captured_runs, fake_run(eager, [9.0], 8)])
    [base, loop, captured] = plotted_times(runs)
    assert (base.place, base.line, base.value) == ("eager", "batch 1", 1.0)
    assert captured.value == pytest.approx(24 ** (-1 / 3))
    assert captured.place == "round" and captured.low < captured.value < captured.high
    assert loop.low == loop.value == loop.high == 0.5, "one turn gives no bar"


def test_every_cell_is_in_the_table() -> None:
    [runs] = read_graph_comparisons([fake_run({"name": "eager"}, [4.0]), fake_run(LOOP, [2.0], eager=[4.0])])
    lines = format_graph_comparison(runs).splitlines()
    assert lines[0].split()[:2] == ["batch", "graph"]
    assert lines[3].split() == [
        "1", "full_loop", "2.000", "0.50", "12.0", "2.0", "1.0", "75.0%", "1.000", "3",
        "verify", "70", "draft", "-", "3.000",
    ]  # fmt: skip
    assert "Batch 1: acceptance length is 3.0000 in all modes." in lines


def test_a_mode_with_another_acceptance_length_is_named() -> None:
    eager = fake_run({"name": "eager"}, [4.0])
    stale = fake_run(LOOP | {"metadata": "stale"}, [2.0], accepted=1)
    [runs] = read_graph_comparisons([eager, stale, fake_run(ROUND, [1.0])])
    text = format_graph_comparison(runs)
    assert "Batch 1: acceptance length DIFFERS: eager 3.0000, full_loop, stale metadata 2.0000." in text


def test_without_a_gpu_nothing_is_idle() -> None:
    runs = [fake_run({"name": "eager"}, [4.0]), fake_run(LOOP, [2.0])]
    for run in runs:
        run.summary["gpu_idle_share"] = None
    assert format_graph_comparison(runs).splitlines()[3].split()[7] == "-"


OPTIONS = [file.stem for file in (conf_folder() / "graph").glob("*.yaml")]


def test_every_graph_option_has_a_place_in_the_table(empty_folder: Path) -> None:
    names = {compose([f"graph={option}"]).config.graph.name for option in OPTIONS}
    assert names == set(GRAPH_MODES)


@pytest.mark.parametrize("cell", [["graph=eager", "batch_size=1"], ["graph=round_overlap", "batch_size=16"]])
def test_the_experiment_fills_its_batches_to_the_end(cell: list[str], empty_folder: Path) -> None:
    """There are as many requests as fill batches, and outputs long enough for all profiled rounds at full
    acceptance.
    """
    run_ = compose(["experiment=graph_modes", "hydra.mode=RUN", *cell])
    config, choices = run_.config, run_.choices
    assert refusals(config) == []
    assert choices["drafter"] == "eagle3" and choices["prune"] == "catchup"
    assert config.workload.limit is not None and config.workload.limit % 16 == 0
    skipped_and_last = 3
    most = (config.profile_rounds + skipped_and_last) * (config.drafter.num_draft_tokens + 1) + 1
    assert config.max_new_tokens >= most
