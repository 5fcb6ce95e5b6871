"""`scripts/h200_cells.sh`: each job runs once, a failing one stops no other, and its own cells compose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "h200_cells.sh"


def run_cells(folder: Path, *names: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), str(folder), *names]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)


def test_what_is_done_is_skipped_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    """A job without the time that it needs is left out; the first call's missing ones are all that a second runs."""
    jobs, ran = tmp_path / "jobs", tmp_path / "ran"
    jobs.write_text(
        f"1 bad echo bad >> {ran}; [ -e {tmp_path}/mended ]\n"
        f"99 long echo long >> {ran}\n"
        + "".join(f"1 good{number} echo good{number} '$CUDA_VISIBLE_DEVICES' >> {ran}\n" for number in range(4))
    )
    settings = {"JOBS": str(jobs), "PYTHON": "true", "GPUS": "0,1"}
    first = run_cells(tmp_path / "out", **settings, LIMIT="50")
    assert first.returncode == 1
    assert sorted(line.split()[0] for line in ran.read_text().splitlines()) == ["bad", *(f"good{n}" for n in range(4))]
    assert "missing: bad" in first.stdout and "missing: long" in first.stdout and "missing: good" not in first.stdout
    ran.unlink()
    (tmp_path / "mended").touch()
    again = run_cells(tmp_path / "out", **settings, LIMIT="500")
    assert again.returncode == 0, again.stdout
    assert sorted(ran.read_text().split()) == ["bad", "long"]


@pytest.mark.slow
def test_a_job_that_hangs_is_cut(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("1 hangs sleep 600\n1 next true\n")
    ended = run_cells(tmp_path / "out", JOBS=str(tmp_path / "jobs"), PYTHON="true")
    assert "hangs: rc=124" in ended.stdout and "next: rc=0" in ended.stdout


def test_all_jobs_fit_the_time_of_two_gpus() -> None:
    """25 minutes of two; names are told apart, and points are those of the experiment."""
    *jobs, total = run_cells(Path("nowhere"), "--list").stdout.splitlines()
    names = [line.split()[1] for line in jobs]
    assert len(set(names)) == len(names) > 25
    assert int(total.split()[0]) == sum(int(line.split()[0]) for line in jobs) < 2 * 25 * 60
    points = {file.stem for file in (ROOT / "conf" / "experiment" / "trees" / "point").glob("*.yaml")}
    groups = re.findall(r"\b((?:chain|depth)\d[\d,a-z_]*)", SCRIPT.read_text())
    named = {point for group in groups for point in group.split(",")}
    assert len(named) > 5 and named <= points


@pytest.mark.slow
def test_a_job_of_each_kind_composes(tmp_path: Path) -> None:
    names = ("modes-1", "table-32k", "plain-1", "glm-64", "trees-frozen_kv-64")
    ended = run_cells(tmp_path / "out", *names, DRY="--dry-run", PYTHON=sys.executable)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    logs = [(tmp_path / "out" / "logs" / f"{name}.txt").read_text() for name in names]
    counts = [log.count("nothing is refused before the weights are read") for log in logs]
    assert counts == [2, 1, 2, 1, 10]
    assert not (tmp_path / "out" / "done").exists()
