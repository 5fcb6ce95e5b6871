"""What a terminal shows of recorded runs, and the sentence that sums a run up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from spec_lab.core.errors import UserError
from spec_lab.core.types import FinishReason
from spec_lab.record.measured import Divergence
from spec_lab.record.paired import over_reference
from spec_lab.record.progress import Progress
from spec_lab.record.reading import read_summary
from spec_lab.record.recorder import write_status
from spec_lab.record.runs import (
    Run,
    find_runs,
    load_categories,
    load_configurations,
    load_positions,
    load_requests,
    load_rounds,
    load_runs,
    newest_run,
)
from spec_lab.record.schema import Summary
from spec_lab.record.sinks import write_json
from spec_lab.record.wording import number, with_range
from spec_lab.report import plots
from spec_lab.report.__main__ import main
from spec_lab.report.run_table import format_categories, format_run, format_runs
from spec_lab.report.table import format_table
from tests.fake_runs import MAIN, PLAIN, PROVENANCE, UNPRUNED, FakeEngine, make_info, make_summary, measure, record_run

ROOT = Path(__file__).parents[1]
FAST, SLOW, UNSURE = (1.0, 1.01, 0.99), (2.0, 2.1, 1.9), (1.59, 1.65, 1.5)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """An output folder with an old finished run, a sweep with a refused and a failed one, and the newest, finished."""
    base = tmp_path / "outputs"
    record_run(base / "old", info=make_info(started_at="2026-01-01T00:00:00+00:00"))
    refused = make_info(started_at="2026-01-02T00:00:00+00:00")
    write_status(base / "sweep" / "0", refused, "refused", "drafter=oracle needs temperature 0")
    failed = make_info(started_at="2026-01-03T00:00:00+00:00")
    write_status(base / "sweep" / "1", failed, "failed", "RuntimeError: out of memory")
    record_run(base / "new", info=make_info(started_at="2026-01-04T00:00:00+00:00"))
    return base


def test_table_is_aligned() -> None:
    text = format_table(["name", "value"], [["a", "1.00"], ["longer", "10,000.00"]], left=["name"])
    assert text.splitlines() == [
        "name        value",
        "------  ---------",
        "a            1.00",
        "longer  10,000.00",
    ]
    assert number(None) == with_range(None, None, None) == "-"
    assert with_range(1.416, 1.4, 1.5) == "1.42 (1.40 to 1.50)"


def test_report_over_mixed_statuses(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(outputs)]) == 0
    text = capsys.readouterr().out
    table = text.split("\n\n")[0].splitlines()
    assert table[0].split()[:5] == ["#", "drafter", "prune", "K", "batch"]
    assert [line.split()[-2] for line in table[2:]] == ["finished", "refused", "failed", "finished"]
    assert "#2 refused: drafter=oracle needs temperature 0" in text
    assert "#3 failed: RuntimeError: out of memory" in text
    assert f"The newest finished run, {outputs / 'new'}" in text
    assert "Tokens a request round would go on to emit" in text


def test_report_shows_the_newest_of_the_working_directory(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outputs.parent)
    assert main(["--last", "1"]) == 0
    table = capsys.readouterr().out.split("\n\n")[0]
    assert "outputs/new" in table
    assert "outputs/old" not in table


def test_report_of_named_runs_only(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(outputs / "sweep" / "1"), str(outputs / "old"), str(outputs / "old")]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len(table) == 2 + 2


def test_report_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main([str(folder)]) == 2
        error = capsys.readouterr().err
        assert str(folder) in error
        assert error.count("\n") == 1


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "newer": ({"schema_version": 99}, "schema_version is 99"),
    "no version": ({"schema_version": None}, "schema_version is None"),
    "another status": ({"status": "done"}, 'status is "done", not one of finished, failed'),
    "text for number": ({"seconds": "long"}, 'seconds is "long", not a number'),
    "truth for number": ({"rounds": True}, "rounds is true, not a whole number"),
    "list for keys": ({"config": []}, "config is a list, not a set of keys"),
    "no repeats": ({"repeats": []}, "references.plain.repeats has 3 entries, repeats has 0"),
    "another K": ({"num_draft_tokens": 5}, "has 3 entries, num_draft_tokens is 5"),
    "huge": ({"output_tokens": 10**400}, "output_tokens is a number beyond 2**53"),
    "deep": ({"config": {"nested": reduce(lambda inner, _: [inner], range(40), [])}}, "is nested too deeply"),
    "drafter of no name": ({"config": {"drafter": {"num_draft_tokens": 3}}}, "config.drafter.name is missing"),
    "rule without a form": ({"config": {"acceptance": {"name": "relaxed_thinking"}}}, "config.acceptance.form is"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_hides_no_other(name: str, outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, reason = BROKEN[name]
    path = outputs / "old" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert main([str(outputs)]) == 0
    output = capsys.readouterr()
    table = output.out.split("\n\n")[0].splitlines()
    assert len(table) == 2 + 3
    assert output.err.startswith(f"left out: {path}: ")
    assert reason in output.err
    assert output.err.count("\n") == 1


UNREADABLE = {
    "cut": b'{"schema_version": 2, "stat',
    "empty": b"",
    "no object": b"[1, 2]",
    "no utf-8": b'{"schema_version": "\xff"}',
    "endless": b"[" * 100_000,
    "digits": b'{"schema_version": ' + b"9" * 6000 + b"}",
    "nan": b'{"schema_version": NaN}',
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_only_unreadable_records_are_no_report(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(UNREADABLE[name])
    assert main([str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"left out: {path}: ")
    assert output.err.count("\n") == 1


def test_every_key_is_needed_and_named(tmp_path: Path) -> None:
    summary = make_summary()
    hints = get_type_hints(Summary, include_extras=True)
    for key in (key for key, hint in hints.items() if get_origin(hint) is not NotRequired):
        write_json(tmp_path / "summary.json", {name: value for name, value in summary.items() if name != key})
        with pytest.raises(UserError, match=key):
            read_summary(tmp_path)


def test_notebooks_are_warned_of_what_cannot_be_read(outputs: Path) -> None:
    (outputs / "old" / "summary.json").write_text('{"schema_version": 99}')
    with pytest.warns(UserWarning, match="schema_version is 99"):
        assert len(find_runs([outputs])) == 3


@pytest.mark.parametrize("arguments", [["--last", "0"], ["--last", "-1"]])
def test_arguments_that_show_nothing_are_refused_in_a_line(
    arguments: list[str], outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outputs.parent)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert arguments[0].partition("=")[0] in output.err


def test_report_does_not_look_below_a_run(outputs: Path) -> None:
    """W&B keeps copies of the record inside the run's folder."""
    record_run(outputs / "new" / "wandb" / "record")
    assert len(find_runs([outputs])) == 4


def test_report_on_an_ascii_console(outputs: Path) -> None:
    """Names that its encoding has not are escaped, also in the line of a run left out."""
    path = outputs / "new" / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    by_category = {"prüfung": summary["by_category"].pop("code"), **summary["by_category"]}
    write_json(path, summary | {"by_category": by_category, "name": "\u2192"})
    (outputs / "old").rename(outputs / "ältere")
    (outputs / "ältere" / "summary.json").write_text("{")
    command = [sys.executable, "-m", "spec_lab.report", str(outputs)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment, check=True)
    assert b"pr\\xfcfung" in done.stdout and b"times as fast as plain decoding" in done.stdout
    assert done.stderr.count(b"\n") == 1
    assert b"ltere" in done.stderr


def test_the_table_has_the_names_of_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not those of the options, which do not tell of knobs, and which an extension may have brought."""
    config = {
        "batch_size": 1,
        "drafter": {"name": "copycat", "num_draft_tokens": 3, "offset": 2},
        "acceptance": {"name": "near", "topk": 5},
        "prune": {"prefill": "all_rows", "catchup": "large_batches"},
        "graph": {"name": "mine", "depth": 3},
        "extensions": ["my_lab"],
    }
    choices = {"drafter": "copycat+offset2", "acceptance": "near+topk5", "prune": "all_rows+large_batches"}
    record_run(tmp_path, info=replace(make_info(config), choices=choices))
    assert main([str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[2].split()
    assert (row[1], row[2], row[5]) == ("copycat+offset2", "all_rows+large_batches", "near+topk5")


def test_imposed_acceptance_is_marked() -> None:
    summary = make_summary(acceptance_imposed=True)
    text = format_runs([Run(Path("run"), summary)])
    assert "2.75*" in text
    assert "* the acceptance was imposed, not measured" in text
    assert "imposed, not measured" in summary["verdict"]


def test_knobs_of_no_group_have_a_column_where_runs_differ_in_them() -> None:
    config = make_info().config
    usual = config | {"verify": {"budget": None}, "recurrent": {"rollback": "checkpoints"}}
    runs = [
        Run(Path(f"run{number}"), make_summary(info=make_info(usual | changes)))
        for number, changes in enumerate([{}, {"verify": {"budget": 24}}, {"recurrent": {"rollback": "replay"}}])
    ]
    header = format_runs(runs).splitlines()[0].split()
    lines = [line.split() for line in format_runs(runs).splitlines()[2:5]]
    assert [[line[header.index(name)] for name in ("budget", "rollback")] for line in lines] == [
        ["-", "checkpoints"],
        ["24", "checkpoints"],
        ["-", "replay"],
    ]
    assert not {"budget", "rollback"} & set(format_runs(runs[:1]).splitlines()[0].split())


def as_recorded_before(summary: Summary) -> Summary:
    """The record of a version that did not count the outputs that were cut."""
    parts = [summary, *summary["references"].values(), *summary["by_category"].values()]
    for part in parts:
        part["accuracy"].pop("cut", None)  # type: ignore[index]
    return summary


@pytest.mark.parametrize("is_old", [False, True])
def test_answers_that_were_all_cut_have_no_accuracy(is_old: bool) -> None:
    """Requests of the fake engine end at 24 tokens, from which it follows in records that do not count them."""
    main, plain = (replace(each, correct=dict.fromkeys(each.correct, False)) for each in map(measure, (MAIN, PLAIN)))
    made = as_recorded_before if is_old else lambda summary: summary
    info = make_info(make_info().config | {"max_new_tokens": 24})
    cut = made(make_summary(info=info, main=main, references={"plain": plain}))
    run, categories = (format_run(cut), format_categories(cut))
    assert (run.count(" cut"), categories.count(" cut"), run.count("0.0% (")) == (2 + 3, 3, 0), "not of prose"
    assert "  cut  " in format_runs([Run(Path("run"), cut)])
    cut["schema_version"] = 1
    assert " cut" in format_run(cut)
    one_right = replace(main, correct={**main.correct, "r0": True})
    right = made(make_summary(info=info, main=one_right))
    assert "12.5% (" in format_run(right), "an answer may come before the limit"


def test_one_output_that_ended_makes_an_accuracy_of_0_one() -> None:
    main, plain = (replace(each, correct=dict.fromkeys(each.correct, False)) for each in map(measure, (MAIN, PLAIN)))
    main.repeats[0].requests[0].finish_reason = FinishReason.EOS
    text = format_run(make_summary(main=main, references={"plain": plain}))
    lines = {line.split()[0]: line for line in text.splitlines() if line.endswith((" cut", "%)"))}
    assert {name for name, line in lines.items() if line.endswith(" cut")} == {"dates", "plain"}
    assert {name for name, line in lines.items() if " 0.0% (" in line} == {"this", "code", "all"}


def test_run_shows_its_references_and_categories() -> None:
    text = format_run(make_summary())
    speed, stages, categories, verdict = text.split("\n\n")
    assert [line.split()[0] for line in speed.splitlines()[2:]] == ["this", "plain", "unpruned"]
    assert stages.splitlines()[3].split()[:5] == ["plain", "2.121", "0.050", "-", "-"]
    assert [line.split()[0] for line in categories.splitlines()[2:]] == ["prose", "dates", "code", "all"]
    assert " ".join(verdict.split()) == make_summary()["verdict"]


def test_a_run_without_results_shows_its_reason_only(tmp_path: Path) -> None:
    summary = write_status(tmp_path, make_info(), "refused", "K=0 needs drafter=none")
    assert format_run(summary) == "The run is refused: K=0 needs drafter=none."
    assert format_categories(summary) == ""


@pytest.mark.parametrize(
    ("plain", "before", "after"),
    [
        ((1.0, 1.0, 1.0), "eagle3 is faster: it decoded", "times as fast as plain decoding over 3 turns"),
        ((0.5, 0.5, 0.5), "eagle3 is slower: it decoded", "times as fast as plain decoding over 3 turns"),
        ((0.63, 0.62, 0.64), "eagle3 decoded", "times as fast as plain decoding over 3 turns, within noise"),
    ],
)
def test_verdict_on_speed(plain: tuple[float, ...], before: str, after: str) -> None:
    summary = make_summary(references={"plain": measure(PLAIN, plain)})
    speedup, said = over_reference(summary, summary, "plain"), summary["verdict"]
    assert speedup is not None
    assert f"{before} {with_range(speedup.value, *speedup.ends)} {after}" in said
    assert "with an acceptance length of 2.75 of 4 (drafting pays from " in said
    assert said.endswith(".")
    assert said.count(". ") == 0, "one sentence"


@pytest.mark.parametrize("slowdowns", [(1.0,), (1.0, 1.01)])
def test_verdict_on_few_turns_does_not_judge(slowdowns: tuple[float, ...]) -> None:
    said = make_summary(
        main=measure(MAIN, slowdowns),
        references={"plain": measure(PLAIN, slowdowns), "unpruned": measure(UNPRUNED, slowdowns)},
    )["verdict"]
    assert "eagle3 decoded 1.58 times as fast as plain decoding, with no interval" in said
    assert said.count("repeats=3") == 2, "of the speedup and of what pruning changed"
    assert not any(word in said for word in ("noise", "faster", "slower", "drafting pays from", "fixed cost"))


def test_many_turns_tell_a_gain_that_their_range_would_hide() -> None:
    """From 1.9 to 4.3 in nine turns, three in the middle: no turn is a loss."""
    speedups = (1.92, 2.2, 2.5, 2.8, 3.02, 3.2, 3.6, 4.0, 4.29)
    alone = replace(PLAIN, stage_ms=MAIN.stage_ms)
    base = make_summary(main=measure(MAIN, (1.0,)), references={"plain": measure(alone, (1.0,))})["speedup"]
    assert base is not None
    plain = measure(alone, [speedup / base["value"] for speedup in speedups])
    said = make_summary(main=measure(MAIN, [1.0] * 9), references={"plain": plain})["verdict"]
    assert "eagle3 is faster: it decoded 2.96 (" in said and "9 turns" in said


def test_the_report_judges_a_recorded_run_by_todays_rule() -> None:
    summary = make_summary()
    expected, summary["verdict"] = summary["verdict"], "as another version said it"
    assert " ".join(format_run(summary).split("\n\n")[-1].split()) == expected


def test_verdict_without_references() -> None:
    verdict = make_summary(references={}, divergences=None)["verdict"]
    assert "eagle3 was not timed against plain decoding" in verdict
    assert "not compared with plain decoding" in verdict
    assert "pruning" not in verdict


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], "the same tokens as plain decoding in all 12 requests"),
        (["near_tie"], "the same tokens as plain decoding but for 1 of 12 requests, which diverge at a near-tie"),
        (["near_tie", "bug"], "NOT the same tokens as plain decoding in 1 of 12 requests: a bug"),
        (["lossy", "lossy"], "other tokens than plain decoding in 2 of 12 requests"),
    ],
)
def test_verdict_on_tokens(kinds: list[str], expected: str) -> None:
    found = [Divergence(f"r{index}", 3, 1e-5, kind) for index, kind in enumerate(kinds)]  # type: ignore[arg-type]
    assert expected in make_summary(divergences=found)["verdict"]


@pytest.mark.parametrize(
    ("unpruned", "expected"),
    [
        ((1.0, 1.02, 0.99), "pruning changed the decode rate by +1.4 % (+1.4 to +1.4 %), beyond noise"),
        ((1.0, 1.0, 1.0), "pruning changed the decode rate by +1.0 % (-2.7 to +4.9 %), within noise"),
    ],
)
def test_verdict_on_pruning(unpruned: tuple[float, ...], expected: str) -> None:
    said = make_summary(references={"unpruned": measure(UNPRUNED, unpruned)})["verdict"]
    assert expected in said
    assert "computed 106 of 424 catch-up rows and 12 of 36 rows of prompt logits" in said


FIXED = "mostly fixed cost"
STEP = (0.6, 0.61, 0.6)
"""Plain decoding at these slowdowns takes steps of 1.33 ms, and drafts at three of these do not pay."""


def blamed(stage_ms: dict[str, float], slowdowns: tuple[float, ...] = STEP, device: str = "cpu") -> str:
    info = replace(make_info(), provenance=replace(PROVENANCE, device=device))
    main = measure(replace(MAIN, stage_ms=stage_ms), (1.0, 1.01, 1.0))
    return make_summary(info=info, main=main, references={"plain": measure(PLAIN, slowdowns)})["verdict"]


def test_fixed_cost_is_blamed_only_where_the_stages_bear_it_out() -> None:
    """More rows are all but free, and drafting costs more than they do: 1.4 ms of verify and 3 of drafts."""
    drafter_is_dear = {"verify": 1.4, "catchup": 1.0, "recur": 2.0}
    said = blamed(drafter_is_dear)
    assert "is slower: it decoded" in said and FIXED in said
    assert FIXED not in blamed(drafter_is_dear, device="cuda")
    assert FIXED not in blamed(drafter_is_dear, (2.0, 2.01, 2.0)), "a gain"
    assert FIXED not in blamed({"verify": 4.2, "catchup": 0.1, "recur": 0.1}), "rows are dear"
    assert FIXED not in blamed({"verify": 3.5, "catchup": 0.0, "recur": 0.1}), "the drafter is not to blame"
    assert FIXED not in blamed({"graph": 4.4}), "the stages are not known"


def test_verdict_of_plain_decoding() -> None:
    summary = make_summary(main=measure(PLAIN), references={})
    rate = number(summary["decode_tokens_per_second"], 1)
    assert summary["verdict"] == f"Plain decoding gave {rate} tokens/s and drafted nothing."


ONE_TOKEN, PLAIN_ONE, UNPRUNED_ONE = (replace(engine, max_new_tokens=1) for engine in (MAIN, PLAIN, UNPRUNED))
NO_ROUND = "eagle3 had no round to time: every output ended with the prompt pass's own token; "


@pytest.mark.parametrize(
    ("references", "pruned"),
    [
        ({"plain": PLAIN_ONE, "unpruned": UNPRUNED_ONE}, True),
        ({"plain": PLAIN_ONE}, False),
        ({"unpruned": UNPRUNED_ONE}, True),
        ({}, False),
    ],
)
def test_verdict_without_rounds(references: dict[str, FakeEngine], pruned: bool) -> None:
    """max_new_tokens=1, or an end of sequence at once: what ran beside it is not said to be missing."""
    measured = {name: measure(engine) for name, engine in references.items()}
    verdict = make_summary(main=measure(ONE_TOKEN), references=measured)["verdict"]
    assert verdict.startswith(NO_ROUND)
    assert "not among the references" not in verdict
    assert ("pruning had no round to change and computed 0 of 0 catch-up rows and 12 of 36 rows" in verdict) is pruned


def test_verdict_of_plain_decoding_without_rounds() -> None:
    summary = make_summary(main=measure(PLAIN_ONE), references={})
    expected = "Plain decoding had no round to time: every output ended with the prompt pass's own token."
    assert summary["verdict"] == expected


@pytest.mark.parametrize(
    ("references", "has_speed", "expected"),
    [
        ({"plain": PLAIN}, True, "times as fast as plain decoding"),
        ({"unpruned": UNPRUNED}, False, "not timed against plain decoding (plain is not among the references)"),
        ({"plain": PLAIN_ONE}, False, "not timed against plain decoding (which had no round itself)"),
    ],
)
def test_verdict_says_what_was_missing(references: dict[str, FakeEngine], has_speed: bool, expected: str) -> None:
    summary = make_summary(references={name: measure(engine) for name, engine in references.items()})
    assert expected in summary["verdict"]
    assert (summary["speedup"] is not None) is has_speed


def test_verdict_on_a_lossy_rule_whose_plain_answers_were_not_checked() -> None:
    plain = replace(measure(PLAIN), correct={})
    verdict = make_summary(references={"plain": plain}, acceptance_lossless=False)["verdict"]
    assert "with no answer that was checked in plain decoding too" in verdict
    assert "not among the references" not in verdict


def test_load_runs_has_a_row_a_run(outputs: Path) -> None:
    frame = load_runs(outputs)
    assert list(frame["status"]) == ["finished", "refused", "failed", "finished"]
    assert list(frame["drafter"]) == ["eagle3"] * 4
    assert frame["acceptance_length"].isna().tolist() == [False, True, True, False]
    assert frame["speedup_value"].iloc[0] == pytest.approx(1.59, abs=0.01)
    assert {"batch_size", "verify_ms", "ttft_p50_ms", "accuracy_low", "catchup_computed"} <= set(frame.columns)


def test_load_requests_and_rounds(outputs: Path) -> None:
    summary = newest_run(outputs).summary
    requests, rounds = load_requests(outputs / "new"), load_rounds(outputs / "new")
    assert len(requests) == summary["num_requests"]
    assert requests["rounds"].sum() == summary["rounds"]
    assert requests["acceptance_length_all"].iloc[0] == 23 / 8
    assert len(rounds) == 3 * summary["verify_calls"]
    assert rounds[rounds["repeat"] == 0]["round_ms"].mean() == pytest.approx(summary["round_ms"])
    assert rounds["catchup_computed"].sum() == 3 * summary["rows"]["catchup_computed"]
    with pytest.raises(ValueError, match="never began"):
        load_requests(outputs / "sweep" / "0")


def test_newest_run_is_the_newest_finished(outputs: Path) -> None:
    write_status(outputs / "z", make_info(started_at="2027-01-01T00:00:00+00:00"), "failed", "x")
    assert newest_run(outputs).folder.name == "new"
    assert newest_run(outputs, finished=False).folder.name == "z"
    with pytest.raises(ValueError, match="no finished run"):
        newest_run(outputs / "sweep")


def test_frames_of_one_run() -> None:
    summary = make_summary()
    assert list(load_categories(summary)["category"]) == ["prose", "dates", "code"]
    positions = load_positions(summary)
    assert len(positions) == 4 * 2 * 3
    whole = positions[(positions["category"] == "all") & (positions["kind"] == "conditional")]
    assert list(whole["rate"]) == summary["acceptance_rate_by_position"]["conditional"]
    assert list(load_configurations(summary)["configuration"]) == ["this run", "plain", "unpruned"]


SUMMARIES = {
    "plain decoding": lambda: make_summary(main=measure(PLAIN), references={}),
    "one draft token": lambda: make_summary(main=measure(replace(MAIN, num_draft_tokens=1)), references={}),
    "no rounds": lambda: make_summary(main=measure(replace(MAIN, max_new_tokens=1))),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_plot_draws(name: str, tmp_path: Path) -> None:
    summary: Summary = SUMMARIES[name]()
    figures = [
        plots.acceptance_by_category(summary),
        plots.acceptance_by_position(summary),
        plots.stage_times(summary),
        plots.row_counts(summary),
    ]
    for figure in figures:
        assert isinstance(figure, Figure)
        figure.savefig(tmp_path / "figure.png", dpi=40)


def test_a_run_says_once_which_stages_fall_together_in_a_captured_piece() -> None:
    summary = make_summary()
    assert "one piece of" not in format_run(summary)
    summary["stage_ms_per_round"] = {"verify": 1.0, "draft": 2.0}
    said = " ".join(format_run(summary).split())
    assert said.count("draft is catchup and recur, one piece of graph=") == 1


def test_stage_bars_add_up_to_the_round() -> None:
    summary = make_summary()
    bars = [patch for patch in plots.stage_times(summary).axes[0].patches if patch.get_y() < 0.5]  # type: ignore[attr-defined]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(summary["round_ms"])  # type: ignore[attr-defined]


def test_category_plot_has_a_dot_a_request(tmp_path: Path) -> None:
    summary = record_run(tmp_path)
    axes = plots.acceptance_by_category(summary, load_requests(tmp_path)).axes[0]
    assert sum(np.shape(dots.get_offsets())[0] for dots in axes.collections) == summary["num_requests"]
    assert isinstance(load_requests(tmp_path), pd.DataFrame)


def test_progress_off_a_terminal_is_a_line_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4, "request") as progress:
        progress.stage("plain, repeat 1 of 2")
        progress.advance(2)
        progress.stage("plain, repeat 2 of 2")
        progress.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        "0/4 requests: plain, repeat 1 of 2",
        "2/4 requests: plain, repeat 2 of 2",
    ]


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(4, "request") as progress:
        progress.stage("plain")
        progress.advance(4)
    error = capsys.readouterr().err
    assert "\rplain:   0%" in error
    assert "\n" not in error
