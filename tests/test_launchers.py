"""Jobs in other processes: each has a device for itself, and how they ended is read from the folder."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_lab.__main__ import main
from spec_lab.cli.job import JobOutcome
from spec_lab.cli.outcomes import OUTCOMES_FOLDER, Outcomes
from spec_lab.cli.sweep import FolderResolver, SweepPlace
from spec_lab.cli.task import JobTask, WorkerTask, device_of
from spec_lab.core.errors import UserError
from spec_lab.menu.config import RunConfig
from spec_lab.program import lease
from spec_lab.program.launchers import lost_worker, refuse_missing_launcher, refuse_sharing
from spec_lab.program.lease import leased, lock_file, visible_gpus
from spec_lab.program.sweep_lock import SweepLock, sharing_lock
from spec_lab.record.reading import read_summary
from spec_lab.record.schema import Summary
from spec_lab.record.verdict import verdict
from tests.fake_runs import make_info, make_summary

ROOT = Path(__file__).parents[1]
GPUS = ("GPU-aaaa-1", "GPU-bbbb-2")
CHEAP = ("debug=smoke", "references=[]", "profile_rounds=0", "workload.limit=1", "max_new_tokens=4", "kernels=torch")
TWO_AND_A_REFUSED_ONE = ("drafter=mtp_vanilla", "drafter.num_draft_tokens=1,2,5", *CHEAP)
PROBE = """
import os, signal, sys
from types import ModuleType
from spec_lab.menu.option import LoggerOption
from tests.fake_runner import FakeRunner

def run(chosen, choices, folder):
    (folder / "worker.txt").write_text(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {os.getpid()}")
    if chosen.config.seed == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return FakeRunner().run(chosen, choices, folder)

def register(registry):
    module = ModuleType("spec_lab.measure.runner")
    module.run = run
    sys.modules["spec_lab.measure.runner"] = module
    registry.add(LoggerOption(name="probe", sinks=lambda options: []))
"""
PROBE_OPTION = """# python -m spec_lab extensions=[probe] logger=probe
# Notes in which process and on which GPU a run was; with seed 13 it dies.
defaults:
  - /schema/logger@_here_
  - _self_

name: probe
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two made-up GPUs, on which nothing is leased; a folder to work in."""
    programs, locks, work = tmp_path / "bin", tmp_path / "locks", tmp_path / "work"
    for folder in (programs, locks, work):
        folder.mkdir()
    lines = [f'echo "GPU {number}: made up (UUID: {uuid})"' for number, uuid in enumerate(GPUS)]
    (programs / "nvidia-smi").write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(locks))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "to be restored")  # what the code under test sets is put back too
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.chdir(work)
    lease.take_gpu.cache_clear()
    lease.spread.cache_clear()
    return work


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, list(GPUS)),
        ("0,1", list(GPUS)),
        ("1", [GPUS[1]]),
        ("GPU-bbbb", [GPUS[1]]),
        ("", []),
        ("-1", []),
        ("7,0", [GPUS[0]]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(
    variable: str | None, expected: list[str], host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected


def test_slices_of_a_gpu_are_its_devices(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(os.environ["PATH"].split(os.pathsep)[0]) / "nvidia-smi"
    slices = "".join(f"\n  MIG 1g Device {place}: (UUID: MIG-{name})" for place, name in enumerate("bc"))
    program.write_text(f"#!/bin/sh\necho 'GPU 0: made up (UUID: GPU-a){slices}'\n")
    assert visible_gpus() == ["MIG-b", "MIG-c"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c")
    assert visible_gpus() == ["MIG-c"]


@pytest.mark.parametrize(
    ("n_jobs", "device", "gpus", "message"),
    [
        (2, "cpu", True, "2 jobs at a time would disturb each other's times on one CPU; use hydra.launcher.n_jobs=1"),
        (2, "auto", False, "on one CPU"),
        (3, "auto", True, "3 jobs at a time would disturb each other's times on 2 GPUs; use hydra.launcher.n_jobs=2"),
        (2, "auto", True, None),
        (1, "cpu", True, None),
        (None, "cpu", True, None),
    ],
)
def test_more_jobs_than_devices_are_refused(
    n_jobs: int | None, device: str, gpus: bool, message: str | None, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gpus:
        without_gpus(monkeypatch)
    launcher = {} if n_jobs is None else {"n_jobs": n_jobs}
    if message is None:
        refuse_sharing(launcher, device)
        return
    with pytest.raises(UserError) as caught:
        refuse_sharing(launcher, device)
    assert message in str(caught.value) and "shared_device=true if no times are needed" in str(caught.value)


def test_as_many_jobs_as_cores_are_counted(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joblib = pytest.importorskip("joblib", reason="needs the extra `launchers`")
    monkeypatch.setattr(joblib, "cpu_count", lambda: 8)
    with pytest.raises(UserError, match="n_jobs=-1: 8 jobs at a time"):
        refuse_sharing({"n_jobs": -1}, "auto")
    refuse_sharing({"n_jobs": -7}, "auto")


def test_no_job_is_refused(host: Path) -> None:
    with pytest.raises(UserError, match="n_jobs=0 runs no job; use hydra"):
        refuse_sharing({"n_jobs": 0}, "auto")


def test_cores_are_counted_as_joblib_counts_them(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("joblib", reason="needs the extra `launchers`")
    without_gpus(monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    refuse_sharing({"n_jobs": -1}, "auto")


def test_jobs_that_would_share_are_refused_in_a_line_that_leaves_nothing(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra `launchers`")
    without_gpus(monkeypatch)
    typed = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "prune=none,catchup"]
    assert main(typed) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "refused: hydra.launcher.n_jobs=2: 2 jobs at a time would disturb each other's times on one CPU"
    )
    assert not list(host.iterdir())


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm"])
def test_a_launcher_that_is_not_installed_is_a_line(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_lab.program.launchers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"hydra/launcher={launcher} needs .*pip install .*'\.\[launchers\]'"):
        refuse_missing_launcher(["-m", f"hydra/launcher={launcher}"])
    refuse_missing_launcher(["hydra/launcher=basic", "drafter=joblib"])


def test_what_starts_no_workers_takes_no_launcher(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra `launchers`")
    assert main(["hydra/launcher=joblib", *CHEAP]) == 2
    assert "hydra/launcher=joblib: a single run has nothing to launch; leave it out" in capsys.readouterr().err
    assert not list(host.iterdir())


def test_a_job_cannot_choose_its_gpu(host: Path) -> None:
    with pytest.raises(UserError, match=r"device=cuda:1: .* use device=cuda"), leased("cuda:1"):
        pass


def test_the_cpu_is_given_back_behind_each_job(host: Path) -> None:
    for _ in range(2):
        with leased("cpu"), lock_file("cpu").open() as held, pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


LEASE = """
import os, sys
from spec_lab.program.lease import leased
with leased("auto"):
    print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
"""


def start_worker() -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", LEASE], env=environment, text=True, **pipes)


def line_of(stream: Any) -> str:
    return str(stream.readline()).strip()


def test_every_worker_has_a_gpu_and_a_dead_one_gives_it_back(host: Path) -> None:
    workers = [start_worker(), start_worker()]
    try:
        leases = [line_of(worker.stdout) for worker in workers]
        assert sorted(leases) == sorted(GPUS)
        workers.append(start_worker())
        assert line_of(workers[2].stderr).startswith("waiting for GPU-aaaa-1 or GPU-bbbb-2")
        workers[1].kill()
        assert line_of(workers[2].stdout) == leases[1]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_where_times_are_not_wanted_nobody_waits(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = RunConfig(shared_device=True)
    with device_of(shared), device_of(shared):
        assert os.environ["CUDA_VISIBLE_DEVICES"] in GPUS
    assert list(Path(os.environ["TMPDIR"]).iterdir()) == []
    assert "its times mean nothing (shared_device=true)" in verdict(summary_with({"shared_device": True}))
    assert "mean nothing" not in verdict(summary_with({"shared_device": False})) + verdict(summary_with({}))


def summary_with(config: dict[str, Any]) -> Summary:
    return make_summary(info=make_info({"batch_size": 1, "drafter": {"num_draft_tokens": 3}} | config))


def test_a_gpu_is_not_chosen_behind_cudas_back(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="before CUDA starts"), leased("cuda"):
        pass


def test_outcomes_are_read_back_and_one_that_never_ended_failed(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path)
    assert outcomes.read() == []
    outcomes.begin(10)
    for number, outcome in (
        (2, JobOutcome("finished", tmp_path / "a-run")),
        (0, JobOutcome("refused", None, "x=1 is no good")),
        (3, JobOutcome("finished", tmp_path / "b-run", earlier=True)),
    ):
        outcomes.begin(number)
        outcomes.end(number, outcome)
    refused, first, earlier, died = outcomes.read()
    assert refused == JobOutcome("refused", None, "x=1 is no good")
    assert (first.folder, earlier.earlier) == (tmp_path / "a-run", True)
    assert (died.status, died.reason) == ("failed", "it has begun but not ended")
    outcomes.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_outlives_its_command_keeps_the_sweep(tmp_path: Path) -> None:
    """As after SIGKILL, or where one job of submitit died and others run on."""
    command = SweepLock(tmp_path)
    command.take()
    with sharing_lock(tmp_path):
        command.release()
        with pytest.raises(UserError, match="another process is running"):
            SweepLock(tmp_path).take()
    again = SweepLock(tmp_path)
    again.take()
    again.release()
    assert list(tmp_path.iterdir()) == []
    with sharing_lock(tmp_path):
        assert list(tmp_path.iterdir()) == [], "a dry run has no lock"


def test_what_is_sent_to_a_worker_knows_the_folder(tmp_path: Path) -> None:
    def name(*parts: Any) -> str:
        raise AssertionError("a worker names no folder")

    place = SweepPlace(tmp_path / "a-sweep", continues=True)
    task = pickle.loads(pickle.dumps(JobTask(place, lambda config: config, [JobOutcome("finished")], ("my_lab",))))
    assert task == WorkerTask(place, ("my_lab",))
    resolver: Callable[..., str] = pickle.loads(pickle.dumps(FolderResolver(name, place)))
    assert resolver("outputs", "run") == str(tmp_path / "a-sweep")


def test_only_a_launchers_own_error_is_a_lost_worker() -> None:
    from concurrent.futures.process import BrokenProcessPool

    assert lost_worker(BrokenProcessPool("it died\nat length")) == "it died"
    assert lost_worker(RuntimeError("ours")) is None


def run_lab(*typed: str) -> subprocess.CompletedProcess[str]:
    """What `python -m spec_lab` does in a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{Path.cwd()}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "spec_lab", *typed]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def write_probe(folder: Path) -> None:
    option = folder / "probe" / "conf" / "logger" / "probe.yaml"
    option.parent.mkdir(parents=True)
    (folder / "probe" / "__init__.py").write_text(PROBE)
    option.write_text(PROBE_OPTION)


def statuses_in(sweep: Path) -> list[str]:
    return sorted(read_summary(path.parent)["status"] for path in sweep.glob("*/summary.json"))


def test_joblib_gives_every_worker_a_gpu_and_the_folders_say_how_it_ended(host: Path) -> None:
    """With an extension, which the workers have to import: it decodes nothing, as workers of submitit do below."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra `launchers`")
    write_probe(host)
    launcher = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "extensions=[probe]", "logger=probe")
    done = run_lab(*launcher, *TWO_AND_A_REFUSED_ONE)
    assert done.returncode == 2, done.stderr
    assert "3 jobs: 2 finished, 1 refused" in done.stdout
    [sweep] = host.glob("outputs/smoke-sweep-*")
    assert statuses_in(sweep) == ["finished", "finished", "refused"]
    assert (sweep / "sweep.json").exists() and not (sweep / OUTCOMES_FOLDER).exists()
    assert all(len(list(sweep.glob(f"*/{name}"))) >= 2 for name in ("requests.jsonl", "worker.txt"))
    gpu_of = {pid: gpu for gpu, pid in (path.read_text().split() for path in sweep.glob("*/worker.txt"))}
    assert set(gpu_of.values()) <= set(GPUS)
    assert len(set(gpu_of.values())) == len(gpu_of), "no two workers have one GPU"

    lost = run_lab(*launcher, "drafter=none", "seed=13,14", *CHEAP)
    assert lost.returncode == 1
    assert "failed: a worker ended before its job" in lost.stderr and "Traceback" not in lost.stderr
    [killed] = set(host.glob("outputs/smoke-sweep-*")) - {sweep}
    assert not (killed / "sweep.json").exists(), "the same command continues"


def test_submitit_leaves_outcomes_in_the_folders_and_its_jobs_take_turns(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its local executor starts all jobs at once; on a CPU one runs at a time."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra `launchers`")
    without_gpus(monkeypatch)
    typed = ("-m", "hydra/launcher=submitit_local", *TWO_AND_A_REFUSED_ONE)
    done = run_lab(*typed)
    assert done.returncode == 2, done.stderr
    assert "3 jobs: 2 finished, 1 refused" in done.stdout
    assert "refused: drafter.num_draft_tokens=5: drafter=mtp_vanilla has a module for each draft" in done.stderr
    [sweep] = host.glob("outputs/smoke-sweep-*")
    assert statuses_in(sweep) == ["finished", "finished", "refused"]
    waited = [path for path in sweep.glob(".submitit/**/*.err") if "waiting for cpu" in path.read_text()]
    assert len(waited) >= 1


def test_a_cluster_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_lab.program.launchers.find_spec", lambda _: True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"starts jobs with srun, which is not installed here; .*hydra/launcher=basic"):
        refuse_missing_launcher(["hydra/launcher=submitit_slurm"])
    refuse_missing_launcher(["hydra/launcher=submitit_local"])
