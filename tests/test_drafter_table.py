"""Drafters side by side: which runs are compared, the figures of a cell, what the tables show where one is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.__main__ import main as run_lab
from spec_lab.record.measured import Divergence, RunInfo
from spec_lab.record.recorder import write_status
from spec_lab.record.runs import Run, find_runs
from spec_lab.record.schema import Status, Summary
from spec_lab.report.__main__ import main
from spec_lab.report.drafter_plot import acceptance_against_draft_tokens, predicted_against_measured
from spec_lab.report.drafter_table import Cell, format_comparison, read_comparisons
from spec_lab.report.table import WIDEST_TEXT
from tests.fake_runs import CHOICES, MAIN, PLAIN, make_info, make_summary, measure

REFUSAL = "drafter.num_draft_tokens=5: drafter=mtp_vanilla has a module for each draft, but 3 are shipped"


@pytest.fixture(autouse=True)
def usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDEST_TEXT))


@dataclass(frozen=True, slots=True)
class FakeCell:
    """A made-up run of `drafter` at K in minute `minute` of an hour; `stage_ms` comes on top of the fake engine's."""

    drafter: str
    num_draft_tokens: int
    minute: int = 0
    options: Mapping[str, Any] | None = None
    stage_ms: Mapping[str, float] | None = None
    has_plain: bool = True
    batch_size: int = 1

    def info(self) -> RunInfo:
        drafter = {"name": self.drafter, "num_draft_tokens": self.num_draft_tokens} | dict(self.options or {})
        config = {"batch_size": self.batch_size, "seed": 0, "name": f"name {self.minute}", "drafter": drafter}
        info = make_info(config, started_at=f"2026-01-02T03:{self.minute:02d}:00+00:00")
        return replace(info, choices=CHOICES | {"drafter": self.drafter})

    def summary(self, **changes: Any) -> Summary:
        stages = MAIN.stage_ms | dict(self.stage_ms or {})
        engine = replace(MAIN, num_draft_tokens=self.num_draft_tokens, stage_ms=stages)
        references = {"plain": measure(PLAIN)} if self.has_plain else {}
        changes = {"main": measure(engine), "references": references} | changes
        return make_summary(info=self.info(), **changes)

    def run(self, **changes: Any) -> Run:
        return Run(Path(f"run {self.minute}"), self.summary(**changes))

    def unfinished(self, folder: Path, status: Status, reason: str) -> Run:
        return Run(folder, write_status(folder, self.info(), status, reason))


def rows_of(text: str) -> dict[str, list[str]]:
    """The tables' rows as words, those of one drafter and K joined."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > 4 and words[1].isdecimal():
            rows.setdefault(f"{words[0]} {words[1]}", []).extend(words[2:])
    return rows


@pytest.fixture
def sweep(tmp_path: Path) -> list[Run]:
    """A recorded sweep of two drafters at two K, in which one cell was refused."""
    return [
        FakeCell("oracle", 3, minute=1).run(),
        FakeCell("oracle", 5, minute=2).run(),
        FakeCell("mtp_vanilla", 3, minute=3).run(),
        FakeCell("mtp_vanilla", 5, minute=4).unfinished(tmp_path, "refused", REFUSAL),
    ]


def test_cells_come_by_drafter_as_they_ran_then_by_draft_tokens(sweep: list[Run]) -> None:
    [cells] = read_comparisons([sweep[1], sweep[2], sweep[0], sweep[3]])
    assert [(cell.drafter, cell.num_draft_tokens) for cell in cells] == [
        ("oracle", 3),
        ("oracle", 5),
        ("mtp_vanilla", 3),
        ("mtp_vanilla", 5),
    ]


def test_drafters_are_called_as_their_runs_call_them() -> None:
    """One of an extension too, that this report has never heard of; an older record's name tells no knobs."""
    runs = []
    for minute, (called, options) in enumerate(
        [("copycat", {"offset": 0}), ("copycat+offset2", {"offset": 2}), ("eagle3", {}), ("eagle3", {"window": 64})]
    ):
        run = FakeCell("copycat" if "offset" in options else "eagle3", 3, minute, options).run()
        run.summary["choices"]["drafter"] = called
        runs.append(run)
    runs[2].summary["config"]["drafter"]["window"] = None
    [cells] = read_comparisons(runs)
    names = ["copycat", "copycat+offset2", "eagle3 window=None", "eagle3 window=64"]
    assert [cell.drafter for cell in cells] == names
    assert all(name in format_comparison(cells) for name in names)
    assert acceptance_against_draft_tokens(cells).axes


def test_costs_in_milliseconds_and_in_plain_steps() -> None:
    """By hand: plain's round is 2.1 + .05 + .05 and .02 outside the stages; the medians are of slowdown 1."""
    cell = Cell("eagle3", 3, FakeCell("eagle3", 3, stage_ms={"verify": 3.33, "catchup": 0.61, "recur": 0.5}).summary())
    assert cell.draft_ms == pytest.approx(1.11)
    assert cell.in_plain_steps(cell.draft_ms) == pytest.approx(1.11 / 2.22)
    assert cell.in_plain_steps(cell.verify_ms) == pytest.approx(3.33 / 2.22)
    round_ms = 3.33 + 0.1 + 0.61 + 0.5 + 0.05 + 0.02
    assert cell.summary["break_even_acceptance_length"] == pytest.approx(round_ms / 2.22)
    assert cell.predicted_speedup == pytest.approx((cell.summary["acceptance_length"] or 0) * 2.22 / round_ms)


def test_measured_is_predicted_but_for_rounds_cut_short() -> None:
    summary = FakeCell("eagle3", 3).summary()
    cell, speedup = Cell("eagle3", 3, summary), summary["speedup"]
    length, with_cut = summary["acceptance_length"], summary["acceptance_length_all"]
    assert speedup is not None and cell.predicted_speedup is not None and length and with_cut
    assert length != with_cut
    assert speedup["value"] / cell.predicted_speedup == pytest.approx(with_cut / length)


def test_end_to_end_speedup_has_the_prompt_passes_in_it() -> None:
    """12 requests: 2 ms of prompt pass each, both sides alike, so the ratio lies nearer to 1 than the decode rate's."""
    summary = FakeCell("eagle3", 3).summary()
    end_to_end, speedup = Cell("eagle3", 3, summary).end_to_end_speedup, summary["speedup"]
    assert end_to_end is not None and speedup is not None
    assert 1 < end_to_end.value < speedup["value"]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [({"catchup": 0.5}, 0.5), ({"draft": 0.7}, 0.7), ({"catchup": 0.5, "recur": 0.25}, 0.75), ({"graph": 4.0}, None)],
)
def test_draft_cost_under_every_graph_mode(stages: dict[str, float], expected: float | None) -> None:
    """One draft token has no recurrent step; a captured loop is one stage; in a captured round no stage is seen."""
    summary = FakeCell("eagle3", 1).summary(main=measure(replace(MAIN, num_draft_tokens=1, stage_ms=stages)))
    draft_ms = Cell("eagle3", 1, summary).draft_ms
    assert draft_ms == (None if expected is None else pytest.approx(expected))


def test_tables_show_length_category_position_and_cost(sweep: list[Run]) -> None:
    [cells] = read_comparisons(sweep)
    text = format_comparison(cells)
    cell, row = cells[0], rows_of(text)["oracle 3"]
    outcomes = cell.summary["by_category"]
    positions = cell.summary["acceptance_rate_by_position"]["unconditional"]
    speedup, end_to_end = cell.speedup, cell.end_to_end_speedup
    assert speedup is not None and speedup.interval is not None and end_to_end is not None
    assert list(outcomes) == ["code", "dates", "prose"]
    assert row == [
        f"{cell.summary['acceptance_length']:.2f}",
        *[f"{outcome['acceptance_length']:.2f}" for outcome in outcomes.values()],
        *[f"{100 * (rate or 0):.0f}" for rate in positions],
        f"{cell.summary['acceptance_length']:.2f}",
        f"{cell.draft_ms:.2f}",
        f"{cell.in_plain_steps(cell.draft_ms):.2f}",
        f"{cell.in_plain_steps(cell.verify_ms):.2f}",
        f"{cell.summary['break_even_acceptance_length']:.2f}",
        f"{cell.predicted_speedup:.2f}",
        f"{speedup.value:.2f}",
        f"({speedup.interval[0]:.2f}",
        "to",
        f"{speedup.interval[1]:.2f})",
        f"{end_to_end.value:.2f}",
    ]
    assert len(rows_of(text)["oracle 5"]) == len(row) + 2, "two positions more"


def test_every_column_is_explained(sweep: list[Run]) -> None:
    [cells] = read_comparisons(sweep)
    text = format_comparison(cells)
    costs = next(line for line in text.splitlines() if "draft ms" in line)
    explained = [line for line in text.splitlines() if line and not line.startswith(" ")]
    for column in ("draft ms", "draft/plain", "verify/plain", "break-even", "predicted", "measured", "end to end"):
        assert column in costs
        assert any(line.startswith(f"{column}  ") for line in explained)
    assert "Predicted and measured differ" in text


def test_a_refused_cell_is_shown_with_its_reason_below(sweep: list[Run]) -> None:
    [cells] = read_comparisons(sweep)
    text = format_comparison(cells)
    row = rows_of(text)["mtp_vanilla 5"]
    assert row.count("refused") == 2
    assert set(row) == {"refused", "-"}
    [reason] = [line for line in text.splitlines() if line.startswith("mtp_vanilla K=5 refused")]
    assert " ".join(text[text.index(reason) :].split()).startswith(f"mtp_vanilla K=5 refused: {REFUSAL}")


def test_tables_fit_a_terminal(tmp_path: Path) -> None:
    """The tables have nine categories, five positions and the longest names there are."""
    names = ("arithmetic", "code", "dates", "lists", "lookup", "order", "prose", "trace", "units")
    runs = [FakeCell("mtp_vanilla", 5).run(), FakeCell("draft_model", 5, minute=1).run()]
    for run in runs:
        outcome = run.summary["by_category"]["code"]
        run.summary["by_category"] = dict.fromkeys(names, outcome)
    runs.append(FakeCell("mtp_vanilla", 1, minute=2).unfinished(tmp_path, "interrupted", "it was killed"))
    [cells] = read_comparisons(runs)
    text = format_comparison(cells)
    assert max(map(len, text.splitlines())) <= WIDEST_TEXT
    assert rows_of(text)["mtp_vanilla 5"].count("interrupted") == 0


def test_wide_acceptance_becomes_two_tables(sweep: list[Run]) -> None:
    [narrow] = read_comparisons(sweep)
    assert format_comparison(narrow).count("drafter  ") == 2
    for run in sweep:
        outcome = FakeCell("oracle", 3).summary()["by_category"]["code"]
        run.summary["by_category"] = {f"a long category {number}": outcome for number in range(5)}
    [wide] = read_comparisons(sweep)
    text = format_comparison(wide)
    assert text.count("drafter  ") == 3
    assert max(map(len, text.splitlines())) <= WIDEST_TEXT


def test_without_references_there_are_costs_but_no_ratios() -> None:
    runs = [FakeCell("oracle", 3).run(), FakeCell("ngram", 3, minute=1, has_plain=False).run()]
    [cells] = read_comparisons(runs)
    text = format_comparison(cells)
    assert rows_of(text)["ngram 3"][-7:] == ["1.10", "-", "-", "-", "-", "-", "-"]
    assert "no ratio to plain decoding, for want of references=[plain]: ngram K=3" in text
    assert "for want of" not in format_comparison([cells[0]])


def test_a_killed_sweep_shows_what_it_has_and_a_second_run_fills_the_rest(tmp_path: Path) -> None:
    killed = [
        FakeCell("oracle", 1, minute=1).run(),
        FakeCell("oracle", 3, minute=2).run(),
        FakeCell("ngram", 1, minute=3).unfinished(tmp_path / "a", "interrupted", "it was killed"),
    ]
    [cells] = read_comparisons(killed)
    text = format_comparison(cells)
    assert set(rows_of(text)["ngram 1"]) == {"interrupted", "-"}
    assert "ngram K=1 interrupted: it was killed" in text
    assert "not run: ngram K=3" in text
    rest = [FakeCell("ngram", 1, minute=4).run(), FakeCell("ngram", 3, minute=5).run()]
    [cells] = read_comparisons([*killed, *rest])
    text = format_comparison(cells)
    assert [cell.is_finished for cell in cells] == [True] * 4
    assert "interrupted" not in text
    assert "not run" not in text


def test_of_one_cell_the_newest_finished_run_counts(tmp_path: Path) -> None:
    runs = [
        FakeCell("ngram", 3, minute=1, stage_ms={"verify": 9.0}).run(),
        FakeCell("ngram", 3, minute=2, stage_ms={"verify": 5.0}).run(),
        FakeCell("ngram", 3, minute=3).unfinished(tmp_path / "a", "failed", "out of luck"),
        FakeCell("oracle", 3, minute=4).unfinished(tmp_path / "b", "failed", "first"),
        FakeCell("oracle", 3, minute=5).unfinished(tmp_path / "c", "failed", "second"),
    ]
    [[ngram, oracle]] = read_comparisons(runs)
    assert ngram.verify_ms == pytest.approx(5.0)
    assert oracle.summary["reason"] == "second"


def test_which_runs_are_compared(tmp_path: Path) -> None:
    one = FakeCell("eagle3", 3).run()
    assert read_comparisons([one]) == []
    alone = [one, FakeCell("eagle3", 5, minute=1).run()]
    assert [len(cells) for cells in read_comparisons(alone)] == [2]
    untimed = [FakeCell("eagle3", k, minute=k, has_plain=False).run() for k in (1, 3)]
    assert read_comparisons(untimed) == [], "one drafter, and nothing beside it"
    assert read_comparisons([one, FakeCell("ngram", 3, batch_size=8).run()]) == []
    assert read_comparisons([one, FakeCell("none", 0).run(main=measure(PLAIN))]) == []
    assert read_comparisons([FakeCell("eagle3", k).unfinished(tmp_path, "failed", "x") for k in (1, 3)]) == []
    for lossy in ({"acceptance_lossless": False}, {"acceptance_imposed": True}):
        assert read_comparisons([one, FakeCell("ngram", 3).run(**lossy)]) == []


def test_one_name_with_other_knobs_is_another_drafter() -> None:
    runs = [
        FakeCell("frozen_kv", k, minute=minute, options={"position": position, "topk": 1}).run()
        for minute, (k, position) in enumerate([(1, "last"), (3, "last"), (1, "bonus"), (3, "bonus")])
    ]
    [cells] = read_comparisons([*runs, FakeCell("ngram", 1, minute=5).run()])
    assert list(dict.fromkeys(cell.drafter for cell in cells)) == [
        "frozen_kv position=last",
        "frozen_kv position=bonus",
        "ngram",
    ]


def test_the_audits_are_summed_up_and_a_bug_names_its_cell() -> None:
    bug, tie = Divergence("r1", 3, 0.5, "bug"), Divergence("r2", 3, 1e-6, "near_tie")
    runs = [FakeCell("oracle", 3).run(), FakeCell("ngram", 3, minute=1).run(divergences=[bug, tie])]
    [cells] = read_comparisons(runs)
    text = " ".join(format_comparison(cells).split())
    assert "24 outputs of 2 runs compared with plain decoding, 1 near-ties, 1 bugs in ngram K=3" in text


def test_title_names_every_machine(sweep: list[Run]) -> None:
    sweep[1].summary["device_name"] = "another CPU"
    [cells] = read_comparisons(sweep)
    title = " ".join(format_comparison(cells).split("\n\n")[0].split())
    assert "acceptance=strict, prune=catchup, graph=eager, batch 1, 12 prompts" in title
    assert title.endswith("on a test CPU, float32, threads 2 and on another CPU, float32, threads 2")


def labels(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_plot_has_a_line_a_drafter_and_grey_bounds(sweep: list[Run]) -> None:
    [cells] = read_comparisons([*sweep, *[FakeCell("random", k, minute=k + 5).run() for k in (3, 5)]])
    figure = acceptance_against_draft_tokens(cells)
    oracle, vanilla, random = figure.axes[0].lines
    assert list(oracle.get_xdata()) == [3, 5]
    assert list(oracle.get_ydata()) == [cell.summary["acceptance_length"] for cell in cells[:2]]
    assert list(vanilla.get_xdata()) == [3], "the refused cell has no point"
    assert oracle.get_color() == random.get_color() != vanilla.get_color()
    assert labels(figure) == ["oracle", "mtp_vanilla", "random"]


def test_plot_has_a_mark_a_cell_at_prediction_and_measurement(sweep: list[Run]) -> None:
    [cells] = read_comparisons([*sweep, FakeCell("ngram", 5, minute=5).run()])
    figure = predicted_against_measured(cells)
    finished = [cell for cell in cells if cell.is_finished and cell.drafter != "oracle"]
    marks = [bars.lines[0] for bars in figure.axes[0].containers]  # type: ignore[attr-defined]
    assert [mark.get_xdata()[0] for mark in marks] == [cell.predicted_speedup for cell in finished]
    speedups = [speedup.value for cell in finished if (speedup := cell.speedup) is not None]
    assert [mark.get_ydata()[0] for mark in marks] == speedups
    assert labels(figure) == ["mtp_vanilla", "ngram", "K = 3", "K = 5"]


def write(folder: Path, cells: Sequence[FakeCell]) -> None:
    from spec_lab.record.sinks import SUMMARY_FILE, write_json

    for number, cell in enumerate(cells):
        (folder / str(number)).mkdir(parents=True)
        write_json(folder / str(number) / SUMMARY_FILE, cell.summary())


def test_report_shows_the_comparison_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [FakeCell("oracle", 3, minute=1), FakeCell("ngram", 3, minute=2)])
    FakeCell("mtp_vanilla", 5, minute=3).unfinished(tmp_path / "refused", "refused", REFUSAL)
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Drafters side by side: target=pocket" in text
    for name in ("acceptance_against_draft_tokens.png", "predicted_against_measured.png"):
        assert f"plot: {tmp_path / name}" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("drafters", "has_plain"), [(("eagle3", "ngram"), False), (("oracle", "random"), True)])
def test_report_without_a_speedup_to_show_draws_acceptance_only(
    drafters: Sequence[str], has_plain: bool, tmp_path: Path
) -> None:
    write(tmp_path, [FakeCell(name, 3, has_plain=has_plain) for name in drafters])
    assert main([str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["acceptance_against_draft_tokens.png"]


def test_the_experiment_at_a_tiny_size(tmp_path: Path) -> None:
    """A guess, a head and the bound above; test_options.py runs every drafter."""
    small = ["workload.limit=1", "max_new_tokens=8", "repeats=1", "warmup_requests=0", "kernels=torch"]
    assert (
        run_lab(
            [
                "experiment=drafters",
                "drafter=random,eagle3,oracle",
                "drafter.num_draft_tokens=3",
                *small,
                f"output_dir={tmp_path}",
            ]
        )
        == 0
    )
    [cells] = read_comparisons(find_runs([tmp_path]))
    assert len(cells) == 3 and all(cell.is_finished for cell in cells)
    text = format_comparison(cells)
    assert max(map(len, text.splitlines())) <= WIDEST_TEXT
    assert ", 0 bugs" in text
    for cell in cells:
        assert cell.draft_ms is not None and cell.predicted_speedup is not None
        assert (cell.drafter == "random") <= (cell.summary["acceptance_length"] == 1)
        assert (cell.drafter == "oracle") <= (cell.summary["acceptance_length"] == cell.num_draft_tokens + 1)
