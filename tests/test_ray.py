"""Jobs that Ray runs on one machine. Its extra, `ray`, is no part of `dev`."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fake_runner import summaries

pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra `ray`")

CHEAP = ["debug=smoke", "references=[]", "profile_rounds=0", "workload.limit=1", "max_new_tokens=4", "kernels=torch"]


def test_without_a_gpu_one_job_runs_at_a_time(tmp_path: Path) -> None:
    """In another process than the command. A refused job leaves its record, and the others go on."""
    shares = ["hydra.launcher.ray.remote.num_gpus=0", "hydra.launcher.ray.remote.num_cpus=1"]
    command = [sys.executable, "-m", "spec_lab", "-m", "hydra/launcher=ray_local", *shares, "device=cpu", *CHEAP]
    settings = {"PYTHONDONTWRITEBYTECODE": "", "RAY_USAGE_STATS_ENABLED": "0"}  # Ray's agents must import in 15 s
    done = subprocess.run(
        [*command, "seed=1,2,3", "drafter.num_draft_tokens=2,40"],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2, done.stderr
    assert "Started a local Ray instance" in done.stderr
    records = list(summaries(tmp_path).values())
    assert sorted(record["status"] for record in records) == ["finished"] * 3 + ["refused"] * 3
    runs = sorted((record["started_at"], record["seconds"]) for record in records if record["status"] == "finished")
    for (before, seconds), (after, _) in pairwise(runs):
        assert datetime.fromisoformat(before) + timedelta(seconds=seconds) <= datetime.fromisoformat(after)
