"""Records of older schema versions: read beside today's, their numbers untouched, and said to be defined otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_lab.core.errors import UserError
from spec_lab.record.reading import read_all_request_rows, read_request_rows, read_summary
from spec_lab.record.runs import find_runs, load_configurations, load_requests
from spec_lab.report.__main__ import main
from tests.fake_runs import record_run

NOTE = "schema versions 1 and 2 left the rounds cut short out"


def write_version_6(folder: Path) -> None:
    """A run's folder as schema version 6 left it: without what version 7 added."""
    record_run(folder)
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"schema_version": 6}
    for speed in (summary, *summary["references"].values()):
        del speed["expert_bytes_read"]
    path.write_text(json.dumps(summary))


def write_version_5(folder: Path) -> None:
    """A run's folder as schema version 5 left it: without what version 6 added."""
    write_version_6(folder)
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"schema_version": 5}
    for speed in (summary, *summary["references"].values()):
        del speed["wasted_rounds"], speed["graph"]["rounds_per_replay"]
    path.write_text(json.dumps(summary))


def write_version_4(folder: Path) -> None:
    """A run's folder as schema version 4 left it: without what version 5 added."""
    write_version_5(folder)
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"schema_version": 4}
    for speed in (summary, *summary["references"].values()):
        for key in ("drafted", "offered", "verified", "prefill_shared"):
            del speed["rows"][key]
        del speed["experts_read"]
    path.write_text(json.dumps(summary))
    drop_from_lines(folder / "requests.jsonl", "offered_per_round")


def write_version_3(folder: Path) -> None:
    """A run's folder as schema version 3 left it: without what version 4 added."""
    write_version_4(folder)
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 3}))
    drop_from_lines(folder / "requests.jsonl", "token_origins", "text_ends")


def write_version_1(folder: Path) -> None:
    """A run's folder as schema version 1 left it."""
    write_version_2(folder)
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"schema_version": 1}
    for key in ("launches_per_round", "replays_per_round", "host_syncs_per_round", "gpu_busy_ms_per_round"):
        del summary[key]
    del summary["gpu_idle_share"]
    for speed in (summary, *summary["references"].values()):
        del speed["launch_ms"], speed["graph"]["nodes"]
    path.write_text(json.dumps(summary))
    drop_from_lines(folder / "rounds.jsonl", "launch_seconds")


def drop_from_lines(path: Path, *keys: str) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if key not in keys} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


WRITERS = {
    1: write_version_1,
    2: lambda folder: write_version_2(folder),
    3: write_version_3,
    4: write_version_4,
    5: write_version_5,
    6: write_version_6,
}


def write_version_2(folder: Path) -> None:
    """A run's folder as schema version 2 left it: without what version 3 added."""
    write_version_3(folder)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["schema_version"] = 2
    for speed in (summary, *summary["references"].values()):
        del speed["stage_ms_per_round"]["readback"]
    path.write_text(json.dumps(summary))
    drop_from_lines(folder / "requests.jsonl", "judged_per_round")
    drop_from_lines(folder / "rounds.jsonl", "num_surplus")


def test_an_older_record_is_reported_beside_newer_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_version_2(tmp_path / "old")
    record_run(tmp_path / "new")
    assert main([str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count(str(tmp_path / "old")) >= 1
    assert captured.err.startswith("not compared with #1: #2 (") and captured.err.count("\n") == 1
    assert NOTE in " ".join(captured.out.split())
    assert main([str(tmp_path / "new")]) == 0
    assert NOTE not in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("version", WRITERS)
def test_every_version_is_read_and_what_it_did_not_record_is_unknown(version: int, tmp_path: Path) -> None:
    WRITERS[version](tmp_path)
    summary = read_summary(tmp_path)
    assert summary["schema_version"] == version
    assert summary["acceptance_length"] is not None
    [first, *_] = read_all_request_rows(tmp_path, summary)
    assert (first["offered_per_round"] is None) == (version < 5)
    assert (first["token_origins"] is None) == (version < 4)
    assert summary["wasted_rounds"] == 0 and summary["graph"]["rounds_per_replay"] == 1
    assert summary["experts_read"] is None and summary["references"]["plain"]["experts_read"] is None
    assert len(first["judged_per_round"]) == len(first["accepted_per_round"])
    assert summary["launches_per_round"] is None


@pytest.mark.parametrize("version", WRITERS)
def test_every_version_is_reported(version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    WRITERS[version](tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_its_own_report_says_how_it_was_defined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_version_2(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(NOTE) == 2, "under the line of all runs, and its own tables"


def test_its_frames_have_the_columns_of_today(tmp_path: Path) -> None:
    write_version_2(tmp_path)
    assert len(find_runs([tmp_path])) == 1
    assert load_configurations(read_summary(tmp_path))["readback_ms"].isna().all()
    assert "judged_per_round" in load_requests(tmp_path)


@pytest.mark.parametrize(
    ("reason", "truncated", "judged"),
    [("length", True, [2, 4]), ("eos", True, [2, 3]), ("eos", False, [2, 4]), ("length", False, [2, 4])],
)
def test_judged_rounds_follow_from_how_the_last_was_cut(
    reason: str, truncated: bool, judged: list[int], tmp_path: Path
) -> None:
    write_version_2(tmp_path)
    path = tmp_path / "requests.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row |= {"accepted_per_round": [1, 3], "emitted_per_round": [2, 3], "truncated": truncated, "finish_reason": reason}
    path.write_text(json.dumps(row) + "\n")
    assert read_request_rows(tmp_path)[0]["judged_per_round"] == judged
    path.write_text(json.dumps(row | {"judged_per_round": [2, 1]}) + "\n")
    assert read_request_rows(tmp_path)[0]["judged_per_round"] == [2, 1]


ONE_ROUND: dict[str, object] = {"accepted_per_round": [1], "judged_per_round": [2], "offered_per_round": [2]}
ONE_ROUND |= {"emitted_per_round": [2]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"judged_per_round": [2]}, "differ in length"),
        ({"judged_per_round": "2"}, "judged_per_round"),
        ({"token_origins": "pa"}, "token_origins has 2 letters for 24 output_ids"),
        ({"token_origins": "x" * 24}, "has the letter 'x', which is not an origin"),
        ({"text_ends": [1]}, "text_ends has 1 entries for 24"),
        ({"text_ends": [*range(24, 0, -1)]}, "text_ends does not rise"),
        ({"text_ends": [0] * 24}, "text_ends does not rise"),
        (
            {"accepted_per_round": [4] * 7, "judged_per_round": [5] * 7, "emitted_per_round": [5] * 7}
            | {"offered_per_round": [4] * 7},
            "more drafts in a round than its 3",
        ),
        ({"offered_per_round": [2]}, "differ in length"),
        ({"offered_per_round": [0] * 99}, "differ in length"),
        ({"confidence_per_round": [[]]}, "differ in length"),
        (ONE_ROUND | {"confidence_per_round": [[0.5]]}, "does not have a number for each"),
        (ONE_ROUND | {"confidence_per_round": [[1.5, 0.5]]}, "not between 0 and 1"),
    ],
)
def test_rounds_that_cannot_be_are_refused(changes: dict[str, object], problem: str, tmp_path: Path) -> None:
    summary = record_run(tmp_path)
    path = tmp_path / "requests.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | changes), *others]) + "\n")
    with pytest.raises(UserError, match=problem):
        read_all_request_rows(tmp_path, summary)
