"""SIGKILL at any moment: the same command continues and loses nothing, and whoever reads meanwhile reads whole records.

A handful of kills each; SPEC_LAB_KILLS=100 python -m pytest -m "" tests/test_kills.py makes it a hundred.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml

from spec_lab.record.reading import read_request_rows, read_round_rows, read_summary
from spec_lab.record.runs import load_runs
from spec_lab.report.__main__ import main as report
from tests.killed import Command, Moment, end_of

KILLS = int(os.environ.get("SPEC_LAB_KILLS", "3"))
MOST_CHANGES = 30
"""Between two kills: about two runs' worth."""
NOT_COMPARED = ["folder", "started_at", "seconds"]
MULTIRUN = Command("spec_lab.__main__", ("-m", "drafter.num_draft_tokens=1,2,3"))
REPORT = Command("spec_lab.report.__main__", ("outputs", "--figures", "figures", "--csv", "runs.csv"))
REPORT_CHANGES = 12
NUM_RUNS = 3
PNG_BEGIN, PNG_END = b"\x89PNG\r\n", b"IEND\xaeB`\x82"


def test_killed_command_goes_on_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many whole sweeps as the kills last for, each beside one that nobody disturbed."""
    command = MULTIRUN
    folder = make_workplace_in(tmp_path, 0)
    assert end_of(command.start(folder, None)) == 0, (folder / "output.txt").read_text()
    undisturbed = finished(folder)
    moments, kills, attempt = random.Random("multirun 7"), 0, 0
    while kills < KILLS:
        attempt += 1
        folder = make_workplace_in(tmp_path, attempt)
        ended: dict[Path, bytes] = {}
        while kills < KILLS:
            code = run_watched(command, folder, random_moment(moments))
            check_every_file(folder)
            ended = check_kept(folder, ended)
            if code == 0:
                break
            assert code == -9, (folder / "output.txt").read_text()
            kills += 1
        else:
            assert run_watched(command, folder, None) == 0, (folder / "output.txt").read_text()
        check_kept(folder, ended)
        assert len(list((folder / "outputs").glob("*-sweep-*"))) == 1, "it went on in the folder it had"
        pd.testing.assert_frame_equal(finished(folder), undisturbed)
        capsys.readouterr()


def test_killed_report_leaves_whole_pictures_and_tables_alone(tmp_path: Path) -> None:
    """Whatever the moment, each file is the one before or the new one; the next report mends what is missing."""
    folder = make_workplace_in(tmp_path, 0)
    assert end_of(MULTIRUN.start(folder, None)) == 0, (folder / "output.txt").read_text()
    moments, kills, made = random.Random("report 7"), 0, set[str]()
    while kills < KILLS or len(made) < 3:
        code = end_of(REPORT.start(folder, random_moment(moments, REPORT_CHANGES)))
        assert code in (0, -9), (folder / "output.txt").read_text()
        kills += code == -9
        for path in (folder / "figures").glob("[!.]*"):
            assert path.read_bytes().startswith(PNG_BEGIN) and path.read_bytes().endswith(PNG_END), path
            made.add(path.name)
            if code == 0:
                path.unlink()
        if (folder / "runs.csv").exists():
            assert (folder / "runs.csv").read_text().count("\n") == 1 + 2 * NUM_RUNS
            (folder / "runs.csv").unlink()


def random_moment(generator: random.Random, most_changes: int = MOST_CHANGES) -> Moment:
    """Before a change, with a file open and empty, with its text not yet on disk, or some lines later."""
    return Moment(generator.randint(1, most_changes), generator.choice((0, 1, 2, generator.randint(3, 400))))


def make_workplace_in(parent: Path, number: int) -> Path:
    folder = parent / str(number)
    folder.mkdir()
    return folder


def run_watched(command: Command, folder: Path, death: Moment | None) -> int:
    """The exit code; while the command runs, its records are read and reported."""
    process = command.start(folder, death)
    while process.is_alive():
        if next(summaries(folder), None) is not None:
            assert report([str(folder / "outputs")] * 2) == 0, "two, so that no plots are drawn"
        process.join(0.05)
    return end_of(process)


def summaries(folder: Path) -> Iterator[Path]:
    """Records of runs; a folder that has no name yet begins with a dot."""
    for path in folder.glob("outputs/**/summary.json"):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def check_every_file(folder: Path) -> None:
    """None is half-written, whatever the moment of the kill."""
    for path in folder.glob("outputs/**/*"):
        if path.is_file() and not path.name.startswith("."):
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".yaml":
                assert yaml.safe_load(path.read_text()) is not None
    for path in summaries(folder):
        read_summary(path.parent)
        if (path.parent / "requests.jsonl").exists():
            read_request_rows(path.parent)
        if (path.parent / "rounds.jsonl").exists():
            read_round_rows(path.parent)


def check_kept(folder: Path, before: dict[Path, bytes]) -> dict[Path, bytes]:
    """Runs that had finished stand as they stood, and none is there twice."""
    ended = {path: path.read_bytes() for path in summaries(folder) if read_summary(path.parent)["status"] == "finished"}
    assert {path: ended[path] for path in before} == before
    assert len(ended) <= NUM_RUNS
    return ended


def finished(folder: Path) -> pd.DataFrame:
    """The runs that finished, in the order of what they ran, without where and when; with every row they recorded."""
    runs = load_runs(folder / "outputs")
    runs = runs[runs["status"] == "finished"]
    assert len(runs) == NUM_RUNS
    rows = [
        "".join((Path(run) / name).read_text() for name in ("requests.jsonl", "rounds.jsonl")) for run in runs["folder"]
    ]
    runs = runs.assign(rows=rows).drop(columns=NOT_COMPARED).astype(object)
    runs = runs.where(runs.notna(), None)
    return runs.sort_values(["num_draft_tokens", "seed", "rows"], ignore_index=True)
