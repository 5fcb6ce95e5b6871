"""Any runs side by side: the frame, what may be compared, noise, the cost model, narrow tables, a running sweep."""

from __future__ import annotations

import errno
import json
import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from spec_lab.core.errors import UserError
from spec_lab.record.reading import read_summary
from spec_lab.record.recorder import write_status
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.runs import find_runs
from spec_lab.record.schema import SCHEMA_VERSION
from spec_lab.record.sinks import write_json
from spec_lab.report.__main__ import main
from spec_lab.report.bootstrap import bootstrap_acceptance_length, bootstrap_difference
from spec_lab.report.cells import interval_cell
from spec_lab.report.comparable import comparable_sets, numbered
from spec_lab.report.cost_table import read_costs
from spec_lab.report.frame import COLUMNS, load_frame
from spec_lab.report.origin import signed
from spec_lab.report.overview_plot import lengths_and_differences
from spec_lab.report.paired_table import compare
from spec_lab.report.table import format_table
from tests.fake_runs import CHOICES, MAIN, PLAIN, PROVENANCE, make_info, measure, record_run
from tests.test_record_versions import WRITERS
from tests.test_study import make_rows


def record(folder: Path, minute: int, drafter: str = "eagle3", **changes: Any) -> None:
    info = make_info(started_at=f"2026-01-01T00:{minute:02d}:00+00:00")
    record_run(folder, info=replace(info, choices=CHOICES | {"drafter": drafter}), **changes)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "summary.json"
    write_json(path, json.loads(path.read_text()) | changes)


def edit_prompts(folder: Path) -> None:
    path = folder / "requests.jsonl"
    rows = [json.loads(line) | {"prompt_ids": [9]} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two runs alike."""
    for minute, name in enumerate("ab"):
        record(tmp_path / name, minute)
    return tmp_path


def test_the_frame_has_a_row_a_part_and_the_columns_it_promises(pair: Path) -> None:
    frame = load_frame(pair)
    assert list(frame["part"]) == ["this run", "plain", "unpruned"] * 2
    assert list(frame.columns[: len(COLUMNS)]) == list(COLUMNS)
    main_row, plain, unpruned = (frame.iloc[index] for index in range(3))
    summary = read_summary(pair / "a")
    assert main_row["acceptance_length"] == summary["acceptance_length"]
    assert main_row["predicted_speedup"] == pytest.approx(
        main_row["acceptance_length"] / main_row["break_even_acceptance_length"]
    )
    assert (main_row["num_draft_tokens"], plain["num_draft_tokens"], unpruned["num_draft_tokens"]) == (3, 0, 3)
    assert pd.isna(plain["acceptance_length"]) and pd.isna(plain["speedup"])
    assert unpruned["speedup"] == pytest.approx(unpruned["decode_tokens_per_second"] / 446, rel=0.05)
    assert unpruned["catchup_computed"] == 4 * main_row["catchup_computed"]
    assert main_row["drafter"] == "eagle3" and main_row["version_torch"] == "2.13.0"
    assert main_row["accepted_at_1"] == summary["acceptance_rate_by_position"]["unconditional"][0]
    assert frame["prompts"].nunique() == 1
    assert load_frame([pair / "b", str(pair / "a")])["folder"].nunique() == 2


@pytest.mark.parametrize("folder", [None, 5, [], [None], b"runs", "runs\0", "nowhere"], ids=repr)
def test_a_frame_of_what_is_no_folder_is_refused(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_frame(folder)
    assert isinstance(folder, str | list) or repr(folder) in str(caught.value)


@pytest.mark.parametrize("version", WRITERS)
def test_the_frame_takes_old_and_new_runs(version: int, tmp_path: Path) -> None:
    WRITERS[version](tmp_path / "old")
    record(tmp_path / "new", 59)
    write_status(tmp_path / "refused", make_info(started_at="2027-01-01T00:00:00+00:00"), "refused", "no")
    frame = load_frame(tmp_path)
    assert set(frame["schema_version"]) == {version, SCHEMA_VERSION}
    assert frame.groupby("folder")["acceptance_length"].count().tolist() == [2, 2, 0]
    assert {str(frame[name].dtype) for name in COLUMNS} == {"object", "float64", "Int64", "boolean"}


def mutate(value: Any, rng: random.Random) -> Any:
    """Another value at one place of a JSON value."""
    junk = [None, -1, 3, 1.5, 10**18, "", "x", True, [], {}, [None], {"name": "x"}]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    return rng.choice(junk)


def test_the_frame_of_broken_runs_has_the_others_and_its_types(pair: Path) -> None:
    """Seeded: what a record says is in the frame or warned of, and no other run is lost."""
    path = pair / "a" / "summary.json"
    whole, types = json.loads(path.read_text()), load_frame(pair)[list(COLUMNS)].dtypes
    rng = random.Random(0)
    num_left_out = 0
    for _ in range(40):
        path.write_text(json.dumps(mutate(whole, rng)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            frame = load_frame(pair)
        is_left_out = any("left out" in str(warning.message) for warning in caught)
        num_left_out += is_left_out
        assert str(pair / "b") in set(frame["folder"])
        assert (str(pair / "a") in set(frame["folder"])) is not is_left_out
        assert frame[list(COLUMNS)].dtypes.equals(types)
        frame.to_csv(index=False)
    assert 5 < num_left_out < 40


def rows_of(lengths: Sequence[Sequence[int]]) -> list[RequestRow]:
    rows = make_rows(lengths)
    for number, row in enumerate(rows):
        row["id"] = f"r{number}"
    return rows


def test_a_difference_is_paired_by_prompt() -> None:
    """Prompts differ much more from each other than the two runs on one prompt do."""
    rng = random.Random(1)
    base = [[rng.choice([1, 4])] * 20 for _ in range(40)]
    better = [[min(4, m + (index % 4 == 0)) for index, m in enumerate(part)] for part in base]
    paired = bootstrap_difference(rows_of(better), 3, rows_of(base), 3)
    unpaired = bootstrap_difference(rows_of(better), 3, rows_of(base), 3, paired=False)
    assert paired is not None and unpaired is not None
    assert paired.value == pytest.approx(unpaired.value)
    assert paired.low > 0 and not paired.holds_zero
    assert unpaired.holds_zero
    assert bootstrap_difference(rows_of(better), 3, rows_of(base), 3) == paired, "seeded"
    alone = bootstrap_acceptance_length(rows_of(base), 3)
    assert alone is not None and alone.low < alone.value < alone.high


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    """Two runs of one accept rate differ by chance alone: about 95 of 100 intervals hold 0."""
    rng = random.Random(2)

    def emitted() -> int:
        """1 to 4 tokens of a round with three drafts."""
        return 1 + next((m for m in range(3) if rng.random() > 0.6), 3)

    def draw() -> list[RequestRow]:
        return rows_of([[emitted() for _ in range(12)] for _ in range(30)])

    held = 0
    for _ in range(40):
        interval = bootstrap_difference(draw(), 3, draw(), 3)
        assert interval is not None
        held += interval.holds_zero
    assert 34 <= held <= 40


def test_runs_alike_are_within_noise_and_a_worse_drafter_is_not(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(pair / "c", 2, drafter="ngram")
    path = pair / "c" / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["accepted_per_round"] = [min(1, m) for m in row["accepted_per_round"]]
        row["judged_per_round"] = [m + 1 for m in row["accepted_per_round"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    compared, left_out = compare(numbered(find_runs([pair])))
    assert left_out == []
    assert [row.length_verdict for row in compared] == ["-", "within noise", "shorter"]
    assert [row.speedup_verdict for row in compared] == ["-", "within noise", "within noise"]
    assert all(row.is_paired and row.num_prompts == 12 for row in compared)
    assert main([str(pair), "--base", "3"]) == 0
    text = capsys.readouterr().out
    assert f"Against #3, {pair / 'c'}" in text
    assert text.count("longer") >= 2


def test_runs_of_a_slow_and_a_fast_hour_are_compared_by_their_ratios_to_plain(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine of the third is five times slower: its rates are, and what drafting brings is not."""
    turns = (5.0, 5.2, 4.9)
    record(pair / "slow", 2, main=measure(MAIN, turns), references={"plain": measure(PLAIN, turns)})
    record(pair / "worse", 3, main=measure(MAIN, (1.2, 1.25, 1.22)))
    record(pair / "few", 4, main=measure(MAIN, (9.0, 9.0)), references={"plain": measure(PLAIN, (1.0, 1.0))})
    record(pair / "alone", 5, references={})
    compared, _ = compare(numbered(find_runs([pair])))
    assert [row.speedup_verdict for row in compared][2:] == ["within noise", "lower", "not judged", "no plain beside"]
    slow = compared[2].speedup
    assert slow is not None and slow.value == pytest.approx(1, abs=0.05)
    assert main([str(pair)]) == 0
    assert "no plain beside" in capsys.readouterr().out


def test_one_prompt_has_no_interval_of_width_zero(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [alone] = make_rows([[2, 1, 3]])
    interval = bootstrap_acceptance_length([alone], 3)
    assert interval is not None and (interval.low, interval.high) == (None, None)
    assert interval_cell(interval) == f"{interval.value:.2f}"
    difference = bootstrap_difference([alone], 3, [alone], 3)
    assert difference is not None and difference.low is None and difference.holds_zero
    for name in "ab":
        path = pair / name / "requests.jsonl"
        path.write_text(path.read_text().splitlines()[0] + "\n")
        edit(pair / name, num_requests=1)
    assert [row.length_verdict for row in compare(numbered(find_runs([pair])))[0]] == ["-", "not judged"]
    assert main([str(pair), "--figures", str(pair / "figures")]) == 0
    assert capsys.readouterr().err == ""


APART = {
    "prompts": (lambda folder: edit_prompts(folder), "other prompts"),
    "versions": (
        lambda folder: edit(folder, versions=PROVENANCE.versions | {"torch": "2.12.0"}),
        "torch 2.13.0 and 2.12.0",
    ),
    "definitions": (
        lambda folder: edit(folder, definitions={"acceptance_length": "something else"}),
        "other definitions of acceptance_length",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_must_not_be_compared_is_refused_unless_told(
    name: str, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, reason = APART[name]
    record(pair / "c", 2)
    change(pair / "c")
    assert main([str(pair)]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("not compared with #1: #3 (") and reason in output.err
    assert output.err.count("\n") == 1
    table = output.out.split("Against #1")[1].split("difference:")[0]
    assert "#2" in table and "#3" not in table
    assert main([str(pair), "--anyway"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    table = output.out.split("Against #1")[1].split("difference:")[0]
    assert "#3" in table
    assert ("unpaired" in table) is (name == "prompts")


def test_one_table_for_a_document_has_no_runs_that_must_not_be_compared(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = pair / "failed"
    record(failed, 9)
    edit(failed, status="failed", versions={"torch": "1"})
    assert main([str(pair), "--markdown"]) == 0, "one that has not finished is not in the table"
    assert capsys.readouterr().out.count("| eagle3") == 2
    other = pair / "other"
    record(other, 10)
    edit(other, versions={"torch": "1"})
    assert main([str(pair), "--markdown"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("refused: --markdown puts all runs into one table: not compared with #1: #4 (")
    assert err.strip().endswith("--anyway compares them") and err.count("\n") == 1
    assert main([str(pair), "--markdown", "--anyway"]) == 0
    assert capsys.readouterr().out.count("| eagle3") == 3


def test_rows_of_a_table_for_a_document_are_told_apart(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = read_summary(pair / "b")
    edit(pair / "b", choices=summary["choices"] | {"graph": "round"}, config=summary["config"] | {"batch_size": 8})
    assert main([str(pair), "--markdown", "--anyway"]) == 0
    header, _, first, second = capsys.readouterr().out.splitlines()[:4]
    assert "| rule | graph | K |" in header and first != second and "| round |" in second
    edit(pair / "b", choices=summary["choices"])
    assert main([str(pair), "--markdown", "--anyway"]) == 0
    header, _, first, second = capsys.readouterr().out.splitlines()[:4]
    assert "| rule | batch_size | K |" in header and first != second and "| 8 |" in second


def test_drafters_of_other_versions_are_no_cells_of_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for minute, drafter in enumerate(["eagle3", "ngram"]):
        info = make_info({"drafter": {"name": drafter, "num_draft_tokens": 3}}, f"2026-01-01T00:{minute:02d}:00+00:00")
        record_run(tmp_path / drafter, info=info)
    assert main([str(tmp_path)]) == 0
    assert "Drafters side by side" in capsys.readouterr().out
    edit(tmp_path / "ngram", versions={"torch": "2.12.0"})
    assert main([str(tmp_path)]) == 0
    assert "Drafters side by side" not in capsys.readouterr().out


def test_a_failed_run_is_in_no_set_of_its_own(pair: Path) -> None:
    write_status(pair / "c", make_info(started_at="2027-01-01T00:00:00+00:00"), "failed", "x")
    assert [[run.number for run in part] for part in comparable_sets(numbered(find_runs([pair])))] == [[1, 2, 3]]


def test_the_cost_model_adds_up(pair: Path) -> None:
    oracle = replace(make_info(started_at="2026-01-03T00:00:00+00:00"), choices=CHOICES | {"drafter": "oracle"})
    [first, _] = read_costs(numbered(find_runs([pair])))
    assert (first.oracle_length, first.oracle_was_run) == (4.0, False)
    record_run(pair / "oracle", info=oracle)
    cost = read_costs(numbered(find_runs([pair])))[0]
    summary = read_summary(pair / "a")
    assert cost.draft is not None and cost.verify is not None
    assert cost.draft + cost.verify + cost.rest == pytest.approx(summary["break_even_acceptance_length"])
    assert cost.verify / cost.break_even == pytest.approx(2.4 / 3.67, rel=0.01)
    assert (cost.oracle_length, cost.oracle_was_run) == (summary["acceptance_length"], True)
    assert cost.predicted is not None and cost.off is not None and cost.measured is not None
    assert cost.predicted * (1 + cost.off) == pytest.approx(cost.measured.value)
    assert first.oracle_speedup == pytest.approx(4 / first.break_even)


def test_no_cost_without_plain_decoding_or_drafts(tmp_path: Path) -> None:
    record(tmp_path / "a", 0, references={})
    record(tmp_path / "b", 1, main=measure(PLAIN), references={})
    assert read_costs(numbered(find_runs([tmp_path]))) == []


def test_figures_that_were_asked_for_and_not_saved_are_a_failure(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("spec_lab.report.saved_plots.replace_bytes", full)
    assert main([str(pair), "--figures", str(pair / "figures")]) == 1
    said = capsys.readouterr()
    assert "acceptance_lengths.png (No space left on device)" in said.err and "acceptance length" in said.out


def test_csv_and_figures(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, figures = pair / "runs.csv", pair / "new" / "figures"
    assert main([str(pair), "--csv", str(table), "--figures", str(figures)]) == 0
    assert capsys.readouterr().err == ""
    read = pd.read_csv(table)
    assert len(read) == 6
    assert read["acceptance_length"].tolist()[0] == load_frame(pair)["acceptance_length"][0]
    assert sorted(path.name for path in figures.iterdir()) == ["acceptance_lengths.png", "cost_model.png"]
    assert all(path.stat().st_size > 5000 for path in figures.iterdir())


def test_a_figure_says_what_it_is_of(pair: Path) -> None:
    """The lines are called by rule and pruning too, and below stand the runs, their revision and their machine."""
    other = replace(make_info(started_at="2026-01-01T00:05:00+00:00"), choices=CHOICES | {"prune": "none"})
    record_run(pair / "c", info=other)
    compared, _ = compare(numbered(find_runs([pair])))
    figure = signed(lengths_and_differences(compared), [row.run.run.summary for row in compared])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["#1 eagle3 K=3, strict, catchup", "#2 eagle3 K=3, strict, catchup", "#3 eagle3 K=3, strict, none"]
    [below] = [" ".join(text.get_text().split()) for text in figure.texts]
    assert all(part in below for part in ("run: 3 runs on a test CPU", "revision 0123abc", "2026-01-01"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--base", "0"], "--base=0"),
        (["--base", "3"], "the runs are 1 to 2"),
        (["--csv", "no/such/folder/x.csv"], "--csv=no/such/folder/x.csv cannot be written"),
        (["--csv", "."], "--csv=. cannot be written (.: Is a directory)"),
        (["--csv", "a/summary.json"], "--csv=a/summary.json exists and may be part of a record"),
        (["--csv", "a/verify_rows.safetensors"], "exists and may be part of a record"),
        (["--html", "a/trace.json.gz"], "exists and may be part of a record"),
        (["--csv", "pipe"], "--csv=pipe cannot be written (pipe: not a regular file)"),
        (["--csv", ".."], "--csv=.. cannot be written (..: Is a directory)"),
        (["--markdown", "--figures", "f"], "--markdown prints only its own output; leave out --figures"),
        (["--markdown", "--html", "h"], "leave out --html"),
        (["--html", "h", "--csv", "c"], "leave out --csv"),
        (["--html", "h", "--figures", "f"], "leave out --figures"),
        (["--last", "1"], "--last=1 is for the newest"),
        (["--figures", "a/summary.json"], "--figures=a/summary.json cannot be made"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_a_line(
    arguments: list[str], reason: str, pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pair)
    os.mkfifo("pipe")
    for name in ("verify_rows.safetensors", "trace.json.gz"):
        (pair / "a" / name).touch()
    assert main([".", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_everything_fits_into_80_columns(
    pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pair)
    record(pair / ("long-" * 20), 3, drafter="ngram")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["."]) == 0
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert all("long-long" in line and " " not in line.removeprefix("The newest finished run, ") for line in wide)


@pytest.mark.parametrize("width", [1, 10, 20, 40, 80, 200])
def test_a_wide_table_goes_on_below_with_its_keys(width: int) -> None:
    header = ["name", "K", *(f"column {number}" for number in range(9))]
    body = [[name, "3", *(f"{name}{number}" for number in range(8)), "a long text " * 3] for name in "ab"]
    parts = format_table(header, body, left=("name",), num_keys=2, width=width).split("\n\n")
    assert all(part.splitlines()[0].startswith("name  K") for part in parts)
    assert all(part.splitlines()[2].startswith("a     3") for part in parts)
    cells = " ".join(" ".join(part.splitlines()[2].split()[2:]) for part in parts)
    assert all(f"a{number}" in cells for number in range(8)), "nothing but the long text is cut"
    if width >= 40:
        assert max(len(line) for part in parts for line in part.splitlines()) <= width
