"""`torchrun -m spec_lab` on two processes of a CPU: the record of one process, and an end for all where one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_lab.measure.audit import audit
from spec_lab.measure.lab import load_lab
from spec_lab.menu.chosen import choose
from spec_lab.record.reading import read_request_rows, read_summary
from tests.tiny_runs import CHEAP, make_run_config, make_runnable_pair, write_prompts

PROMPTS = [{"id": f"r{i}", "prompt": "spoken-words"[: 1 + 2 * i] * (1 + i), "form": "continue"} for i in range(4)]
FAILING = '''
"""A drafter that the second rank cannot load."""

import os
from dataclasses import dataclass

from spec_lab.extend import DrafterConfig, DrafterOption


@dataclass
class FailingConfig(DrafterConfig):
    name: str = "failing"


def load(chosen, options, build):
    from spec_lab.options.drafters import none

    if os.environ["RANK"] == "1":
        raise RuntimeError("no " + "luck")
    return none.load(chosen, options, build)


def register(registry):
    registry.add(DrafterOption(name="failing", schema=FailingConfig, load=load, no_loop="fails"))
'''
FAILING_YAML = """\
# python -m spec_lab drafter=failing
# Fails.
defaults:
  - /schema/drafter/failing@_here_
  - _self_
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a head and prompts."""
    folder = tmp_path_factory.mktemp("torchrun")
    make_runnable_pair(folder)
    write_prompts(folder / "prompts.jsonl", PROMPTS)
    return folder


def torchrun(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Start two processes over the prompts of `place`, and wait for both."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    cheap = [f"{name}={value}" for name, value in CHEAP.items()]
    workload = ["workload=jsonl", f"workload.path={place / 'prompts.jsonl'}", "batch_size=2"]
    target = ["target=hf", f"target.path={place / 'target'}", "device=cpu"]
    return subprocess.run(
        [*command, "-m", "spec_lab", *target, *workload, *cheap, "target.tensor_parallel=2", *overrides],
        cwd=place,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(place)])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_two_processes_write_what_one_does(place: Path) -> None:
    """By the audit, with the all-reduces in a graph or out of one; and the first process alone records and prints."""
    drafting = ("drafter=eagle3", f"drafter.path={place / 'head'}", "prune=catchup", "graph=round")
    ended = torchrun(place, *drafting, "references=[plain]", "output_dir=outputs")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ms a round") == 1
    (folder,) = (place / "outputs").iterdir()
    summary = read_summary(folder)
    assert (summary["status"], summary["world_size"]) == ("finished", 2)
    assert summary["config"]["target"]["tensor_parallel"] == 2
    divergence = summary["divergence"]
    assert divergence is not None and divergence["bugs"] == 0
    alone = load_lab(
        choose(make_run_config((place / "target", place / "head"), place / "prompts.jsonl", "none", batch_size=2))
    )
    (engine,) = alone.engines.values()
    plain = {record.request_id: record.output_ids for record in engine.generate(alone.requests).requests}
    together: list[Any] = [SimpleNamespace(request_id=row["id"], **row) for row in read_request_rows(folder)]
    assert [row.request_id for row in together] == list(plain)
    found = audit(together, plain, alone.teacher, alone.models.dtype)
    assert [divergence for divergence in found if divergence.kind == "bug"] == []


def test_a_process_that_fails_ends_all_and_is_heard_once(place: Path) -> None:
    (place / "failing" / "conf" / "drafter").mkdir(parents=True)
    (place / "failing" / "__init__.py").write_text(FAILING)
    (place / "failing" / "conf" / "drafter" / "failing.yaml").write_text(FAILING_YAML)
    ended = torchrun(place, "extensions=[failing]", "drafter=failing", "references=[]", "output_dir=failed")
    assert ended.returncode != 0
    assert ended.stderr.count("RuntimeError: no luck") == 1
    assert ended.stderr.count("failed: the error above is of rank 1") == 1
    (folder,) = (place / "failed").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "rank 1: RuntimeError: no luck")


def test_what_all_processes_refuse_is_refused_once(place: Path) -> None:
    ended = torchrun(place, "drafter=none", "batch_size=0", "output_dir=refused")
    assert ended.returncode != 0
    assert ended.stderr.count("refused: batch_size=0") == 1
    assert not (place / "refused").exists()
