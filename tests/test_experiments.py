"""Every study of `conf/experiment`: it composes, its jobs run, and the report has a table for its question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.__main__ import main
from spec_lab.cli.options import conf_folder
from spec_lab.cli.points import with_points
from spec_lab.errors import UserError
from spec_lab.menu.chosen import Chosen
from spec_lab.record.paired import over_reference
from spec_lab.record.runs import Run, find_runs
from spec_lab.report.__main__ import main as report
from spec_lab.report.knob_plot import plotted_numbers
from spec_lab.report.knob_table import STUDIES, format_knob_study, is_told_by_knobs, read_knob_studies
from spec_lab.report.lines_plot import PlottedNumber, number_over_knob
from tests import recorded_runner
from tests.fake_runs import CHOICES, make_summary

EXPERIMENTS = sorted(path.stem for path in (conf_folder() / "experiment").glob("*.yaml"))
NUM_JOBS = {
    "pruning": 12, "prefill_outputs": 6, "sampling": 9, "batch_scaling": 10, "adaptive_k": 12, "trees": 10,
    "drafters": 23, "drafters_quick": 4, "graph_modes": 12, "relaxed_thinking": 12,
}  # fmt: skip
NUM_JOBS_FULL = {
    "pruning": ([], 12), "prefill_outputs": ([], 10), "sampling": ([], 15), "batch_scaling": ([], 15),
    "adaptive_k": (["batch_size=8", "graph=eager"], 10), "trees": (["batch_size=1", "drafter=frozen_kv"], 12),
}  # fmt: skip
"""The larger ones with some of their values."""
KNOBS = {
    "pruning": {"prune": ["none", "prefill", "post_attention", "catchup"], "K": ["1", "3", "5"]},
    "prefill_outputs": {"prompt tokens": ["64", "256", "768"], "prefill": ["all_rows", "last_row"]},
    "sampling": {"temperature": ["0.4", "0.7", "1.0"], "method": ["one_hot", "standard", "block"]},
    "batch_scaling": {"K": ["1", "3"], "batch": ["1", "2", "4", "8", "16"]},
    "adaptive_k": {"batch": ["1", "8"], "drafting": ["fixed", "stop 0.4", "1:5 3:3 5:1 9:0"]},
    "trees": {"batch": ["1", "8"], "drafter": ["frozen_kv"]},
}
PNG_END = b"IEND\xaeB`\x82"
SMALLEST = ["max_new_tokens=3", "repeats=1", "warmup_requests=0", "profile_rounds=0", "num_threads=1"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> list[Any]:
    """The configurations that a runner which decodes nothing was given."""
    configs: list[Any] = []

    def run(chosen: Chosen, choices: dict[str, str], folder: Path) -> Any:
        configs.append(chosen.config)
        return recorded_runner.run(chosen, choices, folder)

    module = recorded_runner.stand_in()
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", module)
    return configs


def test_every_experiment_is_counted() -> None:
    assert sorted(NUM_JOBS) == EXPERIMENTS
    assert set(KNOBS) == {study.experiment for study in STUDIES}


@pytest.mark.parametrize("experiment", sorted(set(NUM_JOBS) - set(KNOBS)))
@pytest.mark.slow
def test_experiment_runs_every_cell(experiment: str, ran: list[Any]) -> None:
    assert main([f"experiment={experiment}"]) == 0
    assert len(ran) == NUM_JOBS[experiment]


@pytest.mark.parametrize("experiment", list(KNOBS))
@pytest.mark.slow
def test_study_runs_every_cell_and_the_report_has_its_table(
    experiment: str, ran: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([f"experiment={experiment}"]) == 0
    assert len(ran) == NUM_JOBS[experiment]
    [(study, runs)] = read_knob_studies(find_runs([Path("outputs")]))
    assert len(runs) == len(ran), "each cell is a line"
    text = format_knob_study(study, runs)
    assert max(map(len, text.splitlines()[2:])) <= 80
    lines = text.split("\n\n")[1].splitlines()[2:]
    rows = [[str(value) for value in _cells(line)] for line in lines]
    for name, values in KNOBS[experiment].items():
        place = list(study.keys).index(name)
        assert list(dict.fromkeys(row[place] for row in rows)) == values
    capsys.readouterr()
    assert report(["outputs"]) == 0
    out = capsys.readouterr().out
    assert study.question in out
    assert f"plot: outputs/{experiment}.png" in out
    assert Path(f"outputs/{experiment}.png").read_bytes().endswith(PNG_END)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell]


@pytest.mark.slow
def test_sampling_study_never_divides_by_probabilities_drafts_were_not_drawn_with(ran: list[Any]) -> None:
    assert main(["experiment=sampling", "sampling.temperature=0.5"]) == 0
    pairs = [(str(config.acceptance.method), str(config.drafter.draft_sampling)) for config in ran]
    assert pairs == [("one_hot", "greedy"), ("standard", "distribution"), ("block", "distribution")]
    assert {config.sampling.temperature for config in ran} == {0.5}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", NUM_JOBS_FULL)
def test_full_size_has_its_jobs_and_nothing_of_it_is_refused(
    experiment: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some, num_jobs = NUM_JOBS_FULL[experiment]
    assert main([f"experiment={experiment}", "size=full", *some, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("nothing is refused before the weights are read") == num_jobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("points", "found"),
    [("static,chain7", {("static", 3), ("none", 7)}), ("depth5_rows16", {("dynamic", 5)})],
)
def test_points_of_a_grid_run_by_their_names(ran: list[Any], points: str, found: set[tuple[str, int]]) -> None:
    assert main(["experiment=trees", f"points={points}", "batch_size=1"]) == 0
    assert {(config.tree.name, config.drafter.num_draft_tokens) for config in ran} == found
    assert len(ran) == len(found)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["experiment=trees", "points=chain33"], "no point chain33; did you mean chain3?"),
        (["experiment=pruning", "points=chain3"], "add experiment=adaptive_k|relaxed_thinking|sampling|trees"),
        (["points=chain3"], "add experiment=adaptive_k|"),
        (["experiment=trees", "points=static", "points=chain3"], "points=a,b"),
    ],
)
def test_points_that_are_not_there_are_refused(overrides: list[str], remedy: str) -> None:
    with pytest.raises(UserError, match=r"^points=[^\n]+$") as refused:
        with_points(overrides)
    assert remedy in str(refused.value)


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
    runs = _runs({"batch_size": 1}, {"batch_size": 2}, {"batch_size": 1, "seed": 3})
    assert _found(runs) == [["run0", "run1"], ["run2"]]
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


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name != "drafters"])  # test_drafter_table.py
def test_study_decodes_at_its_smallest(experiment: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = "workload.per_category=1" if experiment == "relaxed_thinking" else "workload.limit=2"
    code = main([f"experiment={experiment}", size, *SMALLEST])
    assert code == 0
    assert {run.summary["status"] for run in find_runs([Path("outputs")])} == {"finished"}
    assert report(["outputs"]) == 0
