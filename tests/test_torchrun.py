"""`torchrun -m spec_lab` on two processes of a CPU: the record of one process, and an end for all where one fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spec_lab.__main__ import main
from spec_lab.measure.audit import audit
from spec_lab.measure.lab import load_lab
from spec_lab.record.reading import read_requests, read_run
from tests.tiny_runs import CHEAP, make_run_config, make_runnable_pair, write_prompts

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
PROMPTS = [{"id": f"r{i}", "prompt": "spoken-words"[: 1 + 2 * i] * (1 + i), "form": "continue"} for i in range(4)]
STREAMS = ("stdout", "stderr")
FAILING = '''
"""A drafter that the second rank cannot load."""

import os

from spec_lab.config.option import option
from spec_lab.options.drafters.simple import NoDrafter


@option("drafter", "failing")
class Failing(NoDrafter):
    def build(self, lab):
        if os.environ["RANK"] == "1":
            raise RuntimeError("no " + "luck")
        return super().build(lab)
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


def run_in(place: Path, typed: list[str]) -> None:
    """Be a process of torchrun; what is said goes to files of this rank."""
    os.chdir(place)
    sys.path.insert(0, str(place))
    rank = os.environ["RANK"]
    streams = [os.open(f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in STREAMS]
    os.dup2(streams[0], 1)
    os.dup2(streams[1], 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = main(typed)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


def torchrun(place: Path, *overrides: str) -> tuple[bool, str, str]:
    """Let torchrun's own launcher fork two processes, which import nothing anew, over the prompts of `place`. Return
    whether both finished, and what both wrote to stdout and to stderr."""
    cheap = [f"{name}={value}" for name, value in CHEAP.items()]
    workload = ["workload=jsonl", f"workload.path={place / 'prompts.jsonl'}", "batch_size=2"]
    target = ["target=hf", f"target.path={place / 'target'}", "device=cpu"]
    two = LaunchConfig(1, 1, 2, run_id="x", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    two.max_restarts = 0
    has_finished = True
    try:
        elastic_launch(two, run_in)(place, [*target, *workload, *cheap, "target.tensor_parallel=2", *overrides])
    except ChildFailedError:
        has_finished = False
    stdout, stderr = ("".join((place / f"{name}-{rank}.txt").read_text() for rank in (0, 1)) for name in STREAMS)
    return has_finished, stdout, stderr


def test_two_processes_write_what_one_does(place: Path) -> None:
    """By the audit, with the all-reduces in a graph or out of one; and the first process alone records and prints."""
    drafting = ("drafter=eagle3", f"drafter.path={place / 'head'}", "prune=catchup", "graph=round")
    has_finished, stdout, stderr = torchrun(place, *drafting, "references=[plain]", "output_dir=outputs")
    assert has_finished, stderr
    assert stdout.count("ms a round") == 1
    (folder,) = (place / "outputs").iterdir()
    summary = read_run(folder)
    assert (summary.status, summary.machine.world_size) == ("finished", 2)
    assert summary.config["target"]["tensor_parallel"] == 2
    assert summary["divergence.bugs"] == 0
    alone = load_lab(make_run_config((place / "target", place / "head"), place / "prompts.jsonl", "none", batch_size=2))
    (engine,) = alone.engines.values()
    plain = {record.request_id: record.output_ids for record in engine.generate(alone.requests).requests}
    together: list[Any] = [SimpleNamespace(request_id=row.id, **row.model_dump()) for row in read_requests(folder)]
    assert [row.request_id for row in together] == list(plain)
    found = audit(together, plain, alone.teacher, alone.models.dtype)
    assert [divergence for divergence in found.values() if divergence.kind == "bug"] == []


def test_a_process_that_fails_ends_all(place: Path) -> None:
    (place / "failing" / "conf" / "drafter").mkdir(parents=True)
    (place / "failing" / "__init__.py").write_text(FAILING)
    (place / "failing" / "conf" / "drafter" / "failing.yaml").write_text(FAILING_YAML)
    words = ("extensions=[failing]", "drafter=failing", "references=[]", "output_dir=failed")
    has_finished, _, _ = torchrun(place, *words)
    assert not has_finished
    (folder,) = (place / "failed").iterdir()
    summary = read_run(folder)
    assert summary.status in ("failed", "interrupted"), summary.reason
