"""Every study of `conf/experiment`: it composes, its jobs run, and the report has a table for its question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec_lab.__main__ import main
from spec_lab.app.compose import compose, conf_folder
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.refusals.run import refusals
from spec_lab.record.paired import over_reference
from spec_lab.record.runs import Run, find_runs
from spec_lab.report.__main__ import main as report
from spec_lab.report.knob_plot import plotted_numbers
from spec_lab.report.knob_table import STUDIES, format_knob_study, is_told_by_knobs, read_knob_studies
from spec_lab.report.lines_plot import PlottedNumber, number_over_knob
from tests import recorded_runner
from tests.covering import each_value
from tests.fake_runs import CHOICES, make_summary

EXPERIMENTS = sorted(path.stem for path in (conf_folder() / "experiment").glob("*.yaml"))
OTHERS = ["drafters", "drafters_quick", "graph_modes", "lossy", "relaxed_thinking"]
KNOBS = {
    "pruning": {"prune": ["none", "catchup"], "K": ["3"]},
    "prefill_outputs": {"prompt tokens": ["64"], "prefill": ["all_rows", "last_row"]},
    "sampling": {"temperature": ["0.4"], "method": ["one_hot", "standard", "block"]},
    "batch_scaling": {"K": ["1", "3"], "batch": ["16"]},
    "adaptive_k": {"batch": ["8"], "drafting": ["fixed", "1:5 3:3 5:1 9:0"]},
    "trees": {"batch": ["1", "8"], "drafter": ["frozen_kv"]},
}
"""What the columns of each study hold."""
CELLS: dict[str, tuple[list[str], int]] = {
    "pruning": (["prune=none,catchup", "drafter.num_draft_tokens=3"], 2),
    "prefill_outputs": (["workload.prompt_tokens=64"], 2),
    "sampling": (["sampling.temperature=0.4"], 3),
    "batch_scaling": (["batch_size=16"], 2),
    "adaptive_k": (["experiment/adaptive_k/point@_global_=k3,schedule", "batch_size=8"], 2),
    "trees": (["experiment/trees/point@_global_=static"], 2),
}
"""Some values of each study, and how many runs they are."""
DRAWN = ("pruning", "adaptive_k")
"""Studies whose whole report is asked for: one of numbers, and one of words along its axis."""
PNG_END = b"IEND\xaeB`\x82"
SMALLEST = ["max_new_tokens=3", "repeats=1", "warmup_requests=0", "profile_rounds=0", "kernels=torch"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> list[Any]:
    """The configurations that a runner which decodes nothing was given."""
    configs: list[Any] = []

    def run(chosen: Chosen, choices: dict[str, str], folder: Path) -> Any:
        configs.append(chosen.config)
        return recorded_runner.record_run(chosen, choices, folder)

    module = recorded_runner.stand_in()
    module.record_run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", module)
    return configs


def test_every_experiment_is_counted() -> None:
    assert sorted([*CELLS, *OTHERS]) == EXPERIMENTS
    assert set(KNOBS) == {study.experiment for study in STUDIES}


def test_lossy_rules_are_compared_with_looked_up_and_with_drawn_drafts(ran: list[Any]) -> None:
    assert main(["experiment=lossy", "experiment/lossy/point@_global_=fuzzy0.2", "drafter=ngram", "prune=none"]) == 0
    assert (
        main(
            [
                "experiment=lossy",
                "experiment/lossy/point@_global_=standard,mentored0.1",
                "drafter.draft_sampling=distribution",
            ]
        )
        == 0
    )
    assert [config.acceptance.name for config in ran] == ["fuzzy", "rejection", "mentored"]


def test_graph_modes_are_compared_at_two_batch_sizes(ran: list[Any]) -> None:
    assert main(["experiment=graph_modes", "graph=round_overlap"]) == 0
    assert len({config.batch_size for config in ran}) == len(ran) == 2


def test_a_cell_of_the_drafters_that_cannot_be_is_refused_and_the_others_run(ran: list[Any]) -> None:
    """mtp_vanilla has no five modules."""
    assert main(["experiment=drafters", "drafter=mtp_vanilla", "drafter.num_draft_tokens=3,5"]) == 2
    assert [(config.drafter.name, config.drafter.num_draft_tokens) for config in ran] == [("mtp_vanilla", 3)]
    assert {str(config.prune.catchup) for config in ran} == {"pre_attention"}
    assert {tuple(config.references) for config in ran} == {("plain",)}
    assert {config.workload.limit for config in ran} == {9}


def test_four_drafters_are_compared_in_a_moment(ran: list[Any]) -> None:
    assert main(["experiment=drafters_quick"]) == 0
    assert [config.drafter.name for config in ran] == ["random", "ngram", "eagle3", "oracle"]


@pytest.mark.parametrize("experiment", list(KNOBS))
def test_study_runs_every_cell_and_the_report_has_its_table(
    experiment: str, ran: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    some, num_runs = CELLS[experiment]
    assert main([f"experiment={experiment}", *some]) == 0
    assert len(ran) == num_runs
    [(study, runs)] = read_knob_studies(find_runs([Path("outputs")]))
    assert len(runs) == len(ran), "each cell is a line"
    text = format_knob_study(study, runs)
    assert max(map(len, text.splitlines()[2:])) <= 80
    lines = text.split("\n\n")[1].splitlines()[2:]
    rows = [[str(value) for value in _cells(line)] for line in lines]
    for name, values in KNOBS[experiment].items():
        place = list(study.keys).index(name)
        assert list(dict.fromkeys(row[place] for row in rows)) == values
    assert plotted_numbers(study, runs)
    if experiment == "sampling":  # it never divides by probabilities that drafts were not drawn with
        pairs = [(str(config.acceptance.method), str(config.drafter.draft_sampling)) for config in ran]
        assert pairs == [("one_hot", "greedy"), ("standard", "distribution"), ("block", "distribution")]
    if experiment not in DRAWN:
        return
    capsys.readouterr()
    assert report(["outputs"]) == 0
    out = capsys.readouterr().out
    assert study.question in out
    assert f"plot: outputs/{experiment}.png" in out
    assert Path(f"outputs/{experiment}.png").read_bytes().endswith(PNG_END)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell]


def grid_of(experiment: str) -> dict[str, list[str]]:
    """The values of each key of a study of full size."""
    files = [conf_folder() / "experiment" / path for path in (f"{experiment}.yaml", f"{experiment}/grid/full.yaml")]
    sweepers = [yaml.safe_load(file.read_text()).get("hydra", {}).get("sweeper", {}) for file in files]
    params = {key: str(values) for sweeper in sweepers for key, values in sweeper.get("params", {}).items()}
    return {key: [value.strip() for value in values.split(",")] for key, values in params.items()}


@pytest.mark.parametrize("experiment", [*CELLS, "relaxed_thinking"])
def test_no_value_of_the_full_size_is_refused(experiment: str) -> None:
    """Each value once, beside some of the others."""
    grid = grid_of(experiment)
    for values in each_value(*grid.values()):
        cell = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        config = compose([f"experiment={experiment}", "size=full", "hydra.mode=RUN", *cell]).config
        assert refusals(config) == [], cell


def test_points_of_a_grid_run_by_their_names(ran: list[Any]) -> None:
    assert main(["experiment=trees", "experiment/trees/point@_global_=static,chain7", "batch_size=1"]) == 0
    assert sorted((config.tree.name, config.drafter.num_draft_tokens) for config in ran) == [("none", 7), ("static", 3)]


def _runs(*changes: dict[str, Any], experiment: str = "batch_scaling") -> list[Run]:
    runs = []
    for number, change in enumerate(changes):
        summary = make_summary()
        summary["choices"] = CHOICES | {"experiment": experiment}
        config = {"drafter": {"name": "eagle3", "num_draft_tokens": 3}, "batch_size": 1, "output_dir": str(number)}
        summary["config"] = config | change
        runs.append(Run(Path(f"run{number}"), summary))
    return runs


def _found(runs: Sequence[Run]) -> list[list[str]]:
    return [[run.folder.name for run in found] for _, found in read_knob_studies(runs)]


def test_lines_are_in_the_order_of_the_knobs_and_the_newest_of_equal_runs_counts() -> None:
    k1 = {"drafter": {"name": "eagle3", "num_draft_tokens": 1}}
    runs = _runs({"batch_size": 16}, {"batch_size": 2}, {"batch_size": 2}, k1 | {"batch_size": 4})
    assert _found(runs) == [["run3", "run2", "run0"]]


def test_runs_that_differ_in_more_than_the_knobs_are_studies_apart() -> None:
    others = {"batch_size": 1, "seed": 3}, {"batch_size": 1, "num_threads": 2}
    runs = _runs({"batch_size": 1}, {"batch_size": 2}, *others)
    assert _found(runs) == [["run0", "run1"], ["run2"], ["run3"]]
    other = _runs({"drafter": {"name": "mtp_eagle", "num_draft_tokens": 3}})
    assert _found([*runs[:1], *other]) == [["run0"], ["run0"]]


def test_a_further_knob_has_a_column_where_runs_differ_in_it() -> None:
    """One that follows from the others has none, and parts no study."""
    pruned = {"prune": {"catchup": "all_rows"}}
    changes = [pruned | {"batch_size": size, "workload": {"num_requests": size}} for size in (8, 1)]
    [(study, runs)] = read_knob_studies(_runs(*changes, experiment="pruning"))
    assert [run.folder.name for run in runs] == ["run1", "run0"]
    assert format_knob_study(study, runs).splitlines()[2].split()[:3] == ["batch", "K", "prune"]
    assert format_knob_study(study, runs[:1]).splitlines()[2].split()[:2] == ["K", "prune"]


def test_runs_of_no_study_and_unfinished_ones_have_no_line() -> None:
    runs = _runs({"batch_size": 1}, {"batch_size": 2})
    runs[0].summary["status"] = "failed"
    del runs[1].summary["choices"]["experiment"]
    assert _found(runs) == []
    assert _found(_runs({"batch_size": 1}, experiment="drafters")) == []


def test_a_figure_has_a_line_for_each_value_of_the_other_knobs() -> None:
    k1 = {"drafter": {"name": "eagle3", "num_draft_tokens": 1}}
    runs = _runs({"batch_size": 16}, {"batch_size": 2}, k1 | {"batch_size": 2})
    del runs[0].summary["references"]["plain"]
    [(study, found)] = read_knob_studies(runs)
    numbers = plotted_numbers(study, found)
    assert [(number.place, number.line) for number in numbers] == [("2", "K 1"), ("2", "K 3")]
    ratio = over_reference(runs[1].summary, runs[1].summary, "plain")
    assert ratio is not None
    assert (numbers[1].value, numbers[1].low, numbers[1].high) == (ratio.value, *ratio.ends)


def test_drafters_side_by_side_are_for_runs_that_no_study_tells_apart() -> None:
    k1, ngram = ({"drafter": {"name": name, "num_draft_tokens": 1}} for name in ("eagle3", "ngram"))
    assert is_told_by_knobs([run.summary for run in _runs({}, k1)])
    assert not is_told_by_knobs([run.summary for run in _runs({}, k1, experiment="drafters")])
    two = [run.summary for run in _runs({}, ngram)]
    two[1]["choices"]["drafter"] = "ngram"
    assert not is_told_by_knobs(two), "the drafter is no knob of that study"
    two = [run.summary for run in _runs({}, ngram, experiment="trees")]
    two[1]["choices"]["drafter"] = "ngram"
    assert is_told_by_knobs(two)


def test_places_stand_in_the_order_of_their_values() -> None:
    numbers = [PlottedNumber(place, "", 1.0 + i, 0.5 + i, 3.0 + i) for i, place in enumerate(["16", "2", "4"])]
    axes = number_over_knob(numbers, "title", "batch", "speedup", even=1.0).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "16"]
    assert axes.get_lines()[0].get_ydata().tolist() == [2.0, 3.0, 1.0]
    bars = sorted(float(y) for line in axes.get_lines()[1:4] for y in line.get_ydata())
    assert bars == [0.5, 1.5, 2.5, 3.0, 4.0, 5.0]
    words = number_over_knob([replace(number, place=f"{number.place}x") for number in numbers], "", "", "", None)
    assert [label.get_text() for label in words.axes[0].get_xticklabels()] == ["16x", "2x", "4x"]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.experiment)
def test_a_number_that_a_record_has_not_is_a_dash(study: Any) -> None:
    [run] = _runs({}, experiment=study.experiment)
    run.summary["speedup"] = run.summary["pruning_speedup"] = run.summary["acceptance_length"] = None
    run.summary["references"] = {}
    assert "-" in format_knob_study(study, [run]).splitlines()[-1].split()


def test_a_study_decodes_at_its_smallest(empty_folder: Path) -> None:
    """Each feature, and the drafters (`test_drafter_table.py`), have tests of their own."""
    points = [
        "experiment/relaxed_thinking/point@_global_=top10_delta0.6",
        "drafter.num_draft_tokens=1",
        "workload.limit=7",
    ]
    assert main(["experiment=relaxed_thinking", *SMALLEST, *points]) == 0
    assert {run.summary["status"] for run in find_runs([Path("outputs")])} == {"finished"}
    assert report(["outputs"]) == 0
