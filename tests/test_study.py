"""A study of lossy rules: which runs make one, its table, its plot, and the figures both stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from spec_lab.core.results import GenerationResult, GraphCounts
from spec_lab.record import answer_metrics
from spec_lab.record.acceptance_metrics import acceptance_length
from spec_lab.record.measured import Measured
from spec_lab.record.recorder import Recorder, request_row
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.runs import find_runs
from spec_lab.record.schema import Summary
from spec_lab.record.summary import build_summary
from spec_lab.report.__main__ import main
from spec_lab.report.known_options import describe_rule
from spec_lab.report.study import bootstrap_acceptance_length, format_study, read_studies
from spec_lab.report.study_plot import acceptance_against_accuracy
from tests.covering import each_value
from tests.fake_runs import make_info, make_request, make_round

STRICT = {"name": "strict"}
DELTA = {"name": "relaxed_thinking", "form": "delta", "topk": 10, "delta": 0.6, "ratio": 0.5, "phase": "token"}
RATIO = DELTA | {"form": "ratio", "ratio": 0.3}
TOP3 = DELTA | {"topk": 3}


@dataclass(frozen=True, slots=True)
class FakeRun:
    """A made-up run whose requests all accept `accepted`; those in `wrong` answer wrongly, those in `other` write
    another text.
    """

    options: Mapping[str, Any]
    num_draft_tokens: int
    accepted: Sequence[int]
    wrong: Sequence[int] = ()
    other: Sequence[int] = ()
    num_requests: int = 10
    seed: int = 0
    imposed: bool = False
    minute: int = 0
    label: str | None = None

    def record(self, folder: Path) -> Summary:
        config = {
            "seed": self.seed,
            "acceptance": dict(self.options),
            "drafter": {"name": "eagle3", "num_draft_tokens": self.num_draft_tokens},
            "record": {"topk": 16 if self.options == STRICT else 0},
        }
        requests = [make_request(f"r{i}", self.accepted) for i in range(self.num_requests)]
        for i in self.other:
            requests[i].output_ids[-1] += 1
        is_lossy = self.options != STRICT
        rounds = [make_round([m + 1] * self.num_requests, 0.01) for m in self.accepted]
        for record in rounds:
            record.relaxed = [int(i in self.other) for i in range(self.num_requests)] if is_lossy else None
        result = GenerationResult(requests, rounds, [], GraphCounts(), self.num_draft_tokens, 1.0)
        correct = {f"r{i}": None if self.imposed else i not in self.wrong for i in range(self.num_requests)}
        thinking = {f"r{i}": 4 for i in range(self.num_requests)}
        info = make_info(config, started_at=f"2026-01-02T03:{self.minute:02d}:00+00:00")
        if self.label is not None:
            info = replace(info, choices=info.choices | {"acceptance": self.label})
        summary = build_summary(
            info,
            Measured([result], correct, thinking),
            seconds=1.0,
            acceptance_imposed=self.imposed,
            acceptance_lossless=not is_lossy,
        )
        with Recorder(folder, info) as recorder:
            for request in requests:
                recorder.request(request_row(request, "text", correct[request.request_id], None, 4))
            recorder.finish(summary)
        return summary


SWEEP = [
    FakeRun(RATIO, 3, [3, 3, 3], wrong=[0, 1], other=[0, 1, 2]),
    FakeRun(DELTA, 3, [3, 3, 2], wrong=[1, 2, 3], other=[0, 1, 2, 3]),
    FakeRun(TOP3, 3, [3, 2, 2], wrong=[0], other=[4]),
    FakeRun(STRICT, 3, [2, 2, 2], wrong=[0]),
    FakeRun(DELTA, 1, [1, 1], wrong=[0], other=[5]),
    FakeRun(STRICT, 1, [1, 0], wrong=[0]),
]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for number, run in enumerate(SWEEP):
        run.record(tmp_path / "sweep" / str(number))
    return tmp_path / "sweep"


def test_points_come_by_draft_tokens_strict_first(sweep: Path) -> None:
    [points] = read_studies(find_runs([sweep])).studies
    assert [(point.num_draft_tokens, point.rule) for point in points] == [
        (1, "strict"),
        (1, "top 10, delta 0.6"),
        (3, "strict"),
        (3, "top 3, delta 0.6"),
        (3, "top 10, delta 0.6"),
        (3, "top 10, ratio 0.3"),
    ]


def test_a_point_is_compared_with_strict_at_its_own_number_of_drafts(sweep: Path) -> None:
    [points] = read_studies(find_runs([sweep])).studies
    strict, delta = points[2], points[4]
    assert strict.change is None
    assert strict.equal_to_strict == 1.0
    assert delta.change is not None
    assert (delta.change["over"], delta.change["n"]) == ("strict", 10)
    assert (delta.change["lost"], delta.change["gained"]) == (3, 1)
    assert delta.change["difference"] == pytest.approx(-0.2)
    assert delta.change["low"] < -0.2 < delta.change["high"]
    assert delta.accuracy["value"] == 0.7
    assert delta.acceptance_length is not None
    assert delta.acceptance_length.value == pytest.approx(11 / 3)
    assert delta.thinking_tokens == 4
    # The outputs of all ten are longer than strict's: none is equal.
    assert delta.equal_to_strict == 0.0
    assert delta.hits_per_1000_tokens == pytest.approx(1000 * 12 / 110)


def test_equal_outputs_are_counted(tmp_path: Path) -> None:
    FakeRun(STRICT, 3, [2, 2]).record(tmp_path / "a")
    FakeRun(DELTA, 3, [2, 2], other=[1, 2, 3]).record(tmp_path / "b")
    [[_, delta]] = read_studies(find_runs([tmp_path])).studies
    assert delta.equal_to_strict == 0.7


def test_runs_that_make_no_study(tmp_path: Path) -> None:
    FakeRun(STRICT, 3, [2]).record(tmp_path / "strict")
    assert read_studies(find_runs([tmp_path])).studies == []
    FakeRun(DELTA, 3, [2], seed=1).record(tmp_path / "other seed")
    FakeRun(DELTA, 5, [2]).record(tmp_path / "other K")
    FakeRun({"name": "synthetic"}, 3, [2], imposed=True).record(tmp_path / "imposed")
    assert read_studies(find_runs([tmp_path])).studies == []
    FakeRun(DELTA, 3, [2]).record(tmp_path / "paired")
    [points] = read_studies(find_runs([tmp_path])).studies
    assert [point.rule for point in points] == ["strict", "top 10, delta 0.6"]


def test_of_one_configuration_the_newest_run_counts(tmp_path: Path) -> None:
    FakeRun(STRICT, 3, [2]).record(tmp_path / "strict")
    FakeRun(DELTA, 3, [3], minute=2).record(tmp_path / "new")
    FakeRun(DELTA, 3, [2], minute=1).record(tmp_path / "old")
    [[_, delta]] = read_studies(find_runs([tmp_path])).studies
    assert delta.acceptance_length is not None and delta.acceptance_length.value == 4


def test_another_seed_is_another_study(sweep: Path) -> None:
    for number, run in enumerate((FakeRun(STRICT, 3, [2], seed=1), FakeRun(DELTA, 3, [3], seed=1))):
        run.record(sweep / f"seed-{number}")
    assert [len(points) for points in read_studies(find_runs([sweep])).studies] == [6, 2]


def test_a_run_over_other_prompts_is_left_out(tmp_path: Path) -> None:
    FakeRun(STRICT, 3, [2], num_requests=9).record(tmp_path / "strict")
    FakeRun(TOP3, 3, [3], num_requests=9).record(tmp_path / "same")
    FakeRun(DELTA, 3, [3]).record(tmp_path / "other")
    [points], [reason] = read_studies(find_runs([tmp_path]))
    assert [point.rule for point in points] == ["strict", "top 3, delta 0.6"]
    assert f"{tmp_path / 'other'}: its prompts differ from those of its strict run" in reason


CUTS = {
    "torn": lambda text: text[:-30],
    "short": lambda text: "".join(text.splitlines(keepends=True)[:-2]),
    "wrong type": lambda text: text.replace('"output_ids":[', '"output_ids":["x",', 1),
    "rounds of two lengths": lambda text: text.replace('"accepted_per_round":[', '"accepted_per_round":[3,', 1),
}


@pytest.mark.parametrize(("cut", "broken"), each_value(CUTS, ["2", "3"]))
def test_broken_requests_cost_their_run_and_no_other(
    sweep: Path, cut: str, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folder 3 holds the strict run that three others are compared with."""
    path = sweep / broken / "requests.jsonl"
    path.write_text(CUTS[cut](path.read_text()))
    assert main([str(sweep)]) == 0
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert str(path) in output.err
    assert len(output.out.split("\n\n")[0].splitlines()) == 2 + len(SWEEP)
    study = output.out.partition("What lossy acceptance costs and brings")[2].partition("95 % intervals")[0]
    assert ("top 3" in study) is False
    assert ("ratio 0.3" in study) is (broken == "2")
    assert "top 10, delta 0.6" in study


def test_a_lost_plot_costs_no_table(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder may only be read, as a shared one."""
    (sweep / "acceptance_against_accuracy.png").mkdir()
    assert main([str(sweep)]) == 0
    output = capsys.readouterr()
    assert "What lossy acceptance costs and brings" in output.out
    assert "plot: " not in output.out
    assert output.err.count("\n") == 1
    assert "plot not saved: " in output.err
    assert "acceptance_against_accuracy.png" in output.err


def test_rules_in_words() -> None:
    def words(options: Mapping[str, Any], label: str | None = None) -> tuple[str, str, float | None]:
        choices = {} if label is None else {"acceptance": label}
        info = replace(make_info({"acceptance": dict(options)}), choices=choices)
        return describe_rule(build_summary(info, Measured([]), seconds=1.0))

    assert words(STRICT, "strict") == ("strict", "strict", None)
    assert words(RATIO, "relaxed_thinking+formratio") == ("top 10, ratio 0.3", "top 10, ratio", 0.3)
    assert words(DELTA | {"phase": "round"})[0] == "top 10, delta 0.6, phase=round"
    assert words({})[0] == "-"
    assert words({"name": "near", "topk": 3}, "near+topk3") == ("near+topk3", "near", None)


def test_rules_of_an_extension_are_points_of_their_own(tmp_path: Path) -> None:
    """The report knows nothing of them but what their runs are called."""
    FakeRun(STRICT, 3, [1, 2, 1]).record(tmp_path / "strict")
    for topk in (4, 2):
        rule = {"name": "near", "topk": topk}
        FakeRun(rule, 3, [3, 3, 2], label=f"near+topk{topk}").record(tmp_path / f"near{topk}")
    [points] = read_studies(find_runs([tmp_path])).studies
    assert [point.rule for point in points] == ["strict", "near+topk2", "near+topk4"]
    acceptance_against_accuracy(points)


def make_rows(rounds: Sequence[Sequence[int]]) -> list[RequestRow]:
    """Of requests whose rounds were judged to emit so many tokens."""
    return [request_row(make_request("r", [n - 1 for n in part]), "", None, None) for part in rounds]


def test_bootstrap_resamples_requests() -> None:
    same = bootstrap_acceptance_length(make_rows([[2, 2, 2]] * 50), 3)
    assert same is not None
    assert (same.value, same.low, same.high) == (2, 2, 2)
    # Two kinds of requests: all the spread is between them, and sqrt(.5 * .5 / 100) * 2 * 1.96 = .196 around 2.
    mixed = bootstrap_acceptance_length(make_rows([[1] * 10, [3] * 10] * 50), 3)
    assert mixed is not None
    assert mixed.value == 2
    assert mixed.low == pytest.approx(2 - 0.196, abs=0.02)
    assert mixed.high == pytest.approx(2 + 0.196, abs=0.02)
    assert bootstrap_acceptance_length(make_rows([[1] * 10, [3] * 10] * 50), 3) == mixed


def test_bootstrap_counts_rounds_cut_short_as_the_metric_does() -> None:
    requests = [
        make_request("a", [3, 0, 1, 3], [4, 1, 2, 1], truncated=True),
        make_request("b", [0, 2], [1, 2], judged=[1, 2], truncated=True),
    ]
    cut = bootstrap_acceptance_length([request_row(request, "", None, None) for request in requests], 3)
    assert cut is not None and cut.value == pytest.approx(acceptance_length(requests, 3))
    unknown = make_request("a", [3], [1], judged=[1], truncated=True)
    assert bootstrap_acceptance_length([request_row(unknown, "", None, None)], 3) is None
    assert bootstrap_acceptance_length(make_rows([[]]), 3) is None


def test_paired_interval_covers_and_keeps_a_width() -> None:
    """Agresti and Min (2005), adding half a pair to each of the four cells: 40 pairs, 8 lost, 2 gained."""
    low, high = answer_metrics.paired_difference_interval(8, 2, 40)
    change, spread = -6 / 42, 1.959964 * (11 - 36 / 42) ** 0.5 / 42
    assert (low, high) == (pytest.approx(change - spread), pytest.approx(change + spread))
    low, high = answer_metrics.paired_difference_interval(0, 0, 40)
    assert low == -high < 0
    assert answer_metrics.paired_difference_interval(2, 8, 40)[1] == pytest.approx(
        -answer_metrics.paired_difference_interval(8, 2, 40)[0]
    )
    assert answer_metrics.paired_difference_interval(5, 0, 5)[0] >= -1


def test_accuracy_change_counts_prompts_checked_in_both() -> None:
    ours = {"a": True, "b": False, "c": True, "d": None, "e": True}
    change = answer_metrics.accuracy_change(ours, {"a": True, "b": True, "c": False, "d": True}, over="plain")
    assert change is not None
    assert (change["n"], change["lost"], change["gained"], change["difference"]) == (3, 1, 1, 0)
    assert answer_metrics.accuracy_change({"a": None}, {"a": True}, over="plain") is None


def test_table_has_a_line_a_point(sweep: Path) -> None:
    [points] = read_studies(find_runs([sweep])).studies
    subject, _, *lines = format_study(points).splitlines()
    assert "drafter=eagle3, prune=catchup" in subject
    assert len(lines) == 2 + len(points) + 1 + 2
    assert "top 10, delta 0.6" in lines[6]
    assert "-20.0 (" in lines[6]
    assert "70.0% (" in lines[6]


def test_report_shows_the_study_and_draws_it(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep)]) == 0
    text = capsys.readouterr().out
    plot = sweep / "acceptance_against_accuracy.png"
    assert "What lossy acceptance costs and brings" in text
    assert f"plot: {plot}" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_report_of_single_runs_writes_no_plot(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep / "0"), str(sweep / "3")]) == 0
    assert "difference to strict" in capsys.readouterr().out
    assert not list(sweep.rglob("*.png"))


def test_plot_has_a_bar_both_ways_at_each_point(sweep: Path) -> None:
    [points] = read_studies(find_runs([sweep])).studies
    figure = acceptance_against_accuracy(points)
    assert isinstance(figure, Figure)
    assert [axes.get_title("left") for axes in figure.axes] == ["K = 1", "K = 3"]
    for axes, num_points in zip(figure.axes, (2, 4), strict=True):
        bars = [bar for drawn in axes.collections for bar in drawn.get_segments()]  # type: ignore[attr-defined]
        assert len(bars) == 2 * num_points
        upright = sorted(tuple(bar[:, 1]) for bar in bars if bar[0, 1] != bar[1, 1])
        at_k = [point.accuracy for point in points if axes.get_title("left") == f"K = {point.num_draft_tokens}"]
        np.testing.assert_allclose(upright, sorted((each["low"], each["high"]) for each in at_k))
        stars = [line for line in axes.lines if line.get_marker() == "*" and np.size(line.get_xdata())]
        assert len(stars) == 1
    [legend] = figure.legends
    named = [text.get_text() for text in legend.get_texts() if text.get_text()]
    assert named == ["strict", "top 10, delta 0.6", "top 3, delta 0.6", "top 10, ratio 0.3"]


def test_plot_of_one_panel_and_of_none(tmp_path: Path) -> None:
    FakeRun(STRICT, 3, [2]).record(tmp_path / "strict")
    FakeRun(DELTA, 3, [3]).record(tmp_path / "delta")
    [points] = read_studies(find_runs([tmp_path])).studies
    for chosen in (points, []):
        assert len(acceptance_against_accuracy(chosen).axes) == 1
