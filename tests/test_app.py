"""`python -m spec_lab` as a user sees it: exit codes, folders, sweeps. The run itself is a fake."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_lab
from spec_lab.__main__ import main
from spec_lab.app import names
from spec_lab.app.compose import compose, extensions_in, prepared
from spec_lab.core.errors import UserError
from spec_lab.measure.company import Company
from spec_lab.record.reading import read_requests, read_run
from spec_lab.record.recorder import STILL_RUNNING
from tests.fake_runner import FakeRunner, code_of, summaries

CHEAP = ("debug=smoke", "references=[]", "profile_rounds=0", "workload.limit=1", "max_new_tokens=4", "kernels=torch")


def statuses(base: Path) -> list[str]:
    return [summary["status"] for summary in summaries(base).values()]


def test_a_run_has_one_folder(runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra's: with its name, or the one that is typed."""
    assert main(["drafter=ngram", "prune=catchup", "batch_size=2"]) == 0
    assert main(["hydra.run.dir=X"]) == 0
    [(config, choices, named), (_, _, typed)] = runner.calls
    assert (config.drafter.name, choices["prune"]) == ("ngram", "catchup")
    assert named.parent == empty_folder / "outputs"
    assert named.name.startswith("run-batch_size_2-drafter_ngram-prune_catchup-")
    assert capsys.readouterr().out.splitlines()[-1] == "X"
    assert typed == empty_folder / "X" and (typed / "summary.json").exists() and (typed / ".hydra").is_dir()


def test_a_typed_run_always_runs_and_writes_over_nothing(runner: FakeRunner, empty_folder: Path) -> None:
    assert [main([]), main([])] == [0, 0]
    names = [place.name for _, _, place in runner.calls]
    assert names == [names[0], f"{names[0]}-2"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["batchsize=3"], "batch_size"),
        (["+batchsize=3"], "batchsize"),
        (["drafter.num_draft_token=3"], "drafter.num_draft_tokens"),
        (["num_draft_tokens=3"], "drafter.num_draft_tokens"),
        (["batch_size=two"], "batch_size"),
        (["batch_size=0"], "batch_size"),
        (["drafter=eagel3"], "eagle3"),
        (["drafter=ngram", "drafter.window=3"], "drafter.window"),
        (["drafter=eagle3,ngram"], "drafter=eagle3,ngram"),
        (["-m", "btch_size=1,2"], "batch_size"),
    ],
)
def test_what_does_not_compose_is_refused_by_name(
    arguments: list[str], named: str, runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert named in capsys.readouterr().err and not runner.calls


def test_how_a_run_ends_is_in_its_record(runner: FakeRunner, empty_folder: Path) -> None:
    assert main(["batch_size=0"]) == 2
    runner.begins, runner.error = False, UserError("no such checkpoint")
    assert main(["seed=1"]) == 2
    runner.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        main(["seed=2"])
    runner.error = KeyboardInterrupt()
    assert main(["seed=3"]) == 130
    assert sorted(statuses(empty_folder)) == ["failed", "interrupted", "refused", "refused"]


def test_a_multirun_goes_on_past_its_failures(runner: FakeRunner, empty_folder: Path) -> None:
    runner.errors = {1: UserError("not here"), 3: RuntimeError("a bug")}
    runner.begins = False
    assert code_of(["-m", "seed=1,2", "batch_size=0,1"]) == 2
    assert sorted(statuses(empty_folder)) == ["finished", "refused", "refused", "refused"]
    assert code_of(["-m", "seed=3,4"]) == 1
    assert [config.seed for config, _, _ in runner.calls] == [1, 2, 3, 4]


def test_ctrl_c_ends_a_multirun(runner: FakeRunner, empty_folder: Path) -> None:
    runner.errors = {1: KeyboardInterrupt()}
    assert main(["-m", "seed=1,2"]) == 130
    assert statuses(empty_folder) == ["interrupted"]
    runner.errors = {}
    assert main(["-m", "seed=1,2"]) == 0, "the same command continues"
    assert statuses(empty_folder) == ["finished", "finished"]


def test_a_mended_multirun_ends_with_0(runner: FakeRunner, empty_folder: Path) -> None:
    """A job whose files have changed has a new folder, beside its failure."""
    command = ["-m", "seed=1,2", "workload=jsonl", "workload.path=mine.jsonl"]
    runner.errors = {1: RuntimeError("there is no such file")}
    assert code_of(command) == 1
    (empty_folder / "mine.jsonl").write_text('{"prompt": "a"}\n')
    runner.errors = {}
    assert main(command) == 0
    assert sorted(statuses(empty_folder)) == ["failed", "finished", "finished", "finished"]


def test_a_finished_job_is_not_run_again_while_what_it_read_is_unchanged(
    runner: FakeRunner, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = empty_folder / "mine.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    command = ["-m", "seed=1,2", "workload=jsonl", "workload.path=mine.jsonl"]
    assert main(command) == main(command) == 0
    assert len(runner.calls) == 2
    prompts.write_text('{"prompt": "another"}\n')
    assert main(command) == 0 and len(runner.calls) == 4
    assert main([*command, "name=again"]) == 0 and len(runner.calls) == 6
    assert len(list((empty_folder / "outputs").iterdir())) == 2, "another name has a folder of its own"
    monkeypatch.setattr(names, "sources", lambda extensions=(): "edited code")
    assert main(command) == 0 and len(runner.calls) == 8
    assert len(list((empty_folder / "outputs").iterdir())) == 3, "and so has edited code"


def test_a_knob_that_only_some_options_have_is_left_out_of_the_others(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "acceptance=strict,relaxed_thinking", "acceptance.topk=3,10"]) == 0
    topk = [getattr(config.acceptance, "topk", None) for config, _, _ in runner.calls]
    assert topk == [None, 3, 10], "strict runs once"
    assert "acceptance.topk is left out" in capsys.readouterr().out


def test_a_job_returns_its_objective_also_where_it_was_finished_before(empty_folder: Path) -> None:
    """As a sweeper that searches asks for."""
    from hydra.core.hydra_config import HydraConfig

    from spec_lab.app import run

    returned: list[float | None] = []
    task = run.job

    def job(cfg: Any) -> float | None:
        assert HydraConfig.get().job.num in (0, 1)
        returned.append(task(cfg))
        return returned[-1]

    sampled = ("sampling=sampled", "acceptance=rejection", "acceptance.method=one_hot")
    command = ["-m", *CHEAP, *sampled, "seed=1,2", "objective=summary.acceptance_length"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "job", job)
        assert main(command) == main(command) == 0
    assert len(returned) == 4 and returned[:2] == returned[2:] and all(isinstance(each, float) for each in returned)


def test_jobs_in_a_row_read_the_same_weights_once(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's too; others' are read after these are freed. What is decoded is that of runs alone."""
    from spec_lab.app import run
    from spec_lab.build import models
    from spec_lab.checkpoints import eagle3_checkpoint

    read: list[str] = []

    def counted(load: Any, name: str) -> Any:
        return lambda *of: read.append(name) or load(*of)

    monkeypatch.setattr(models, "load_target", counted(models.load_target, "target"))
    monkeypatch.setattr(eagle3_checkpoint, "load_eagle3", counted(eagle3_checkpoint.load_eagle3, "eagle3"))
    run.last_models.cache_clear()
    assert main(["-m", *CHEAP, "batch_size=1,2", "prune=none,catchup"]) == 0
    assert read == ["target", "eagle3"]
    assert main(["-m", *CHEAP, "drafter=ngram,eagle3", "cache.page_size=8"]) == 0
    assert read[2:] == ["target", "eagle3"], "page_size is the backend's"
    outputs = [[row.output_ids for row in read_requests(path.parent)] for path in empty_folder.rglob("summary.json")]
    assert len(outputs) == 6 and all(each == outputs[0] for each in outputs)
    run.last_models.cache_clear()


def test_other_ranks_record_nothing(
    runner: FakeRunner, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["target.tensor_parallel=2", "logger=wandb", "logger.mode=offline"]) == 0
    [(config, _, place)] = runner.calls
    assert config.logger.name == "jsonl" and not place.exists() and capsys.readouterr().out == ""
    assert not list(empty_folder.iterdir())
    assert main(["-m", "target.tensor_parallel=2", "seed=1,2"]) == 2, "a multirun is for one process"


def test_composing_refusing_and_help_import_no_torch(tmp_path: Path) -> None:
    code = """
import sys
import tempfile
import spec_lab
from spec_lab.__main__ import main
spec_lab.compose(["drafter=eagle3", "prune=catchup"])
assert [main([word]) for word in ("--help", "btch=1", "batch_size=0", "--info=searchpath")] == [0, 2, 2, 0]
sys.argv[1:] = []
assert main(["--cfg", "job", "drafter=ngram"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "max_ngram" in done.stdout
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    asked = subprocess.run(
        [sys.executable, "-m", "spec_lab", "--help", "drafter"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "drafter.window" in asked.stdout and "acceptance.topk" not in asked.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_record_that_says_so(kind: signal.Signals, tmp_path: Path) -> None:
    arguments = ["hydra.run.dir=X", "max_new_tokens=1500", "kernels=torch", "references=[]"]
    command = [sys.executable, "-m", "spec_lab", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    requests = tmp_path / "X" / "requests.jsonl"
    for _ in range(600):
        if requests.exists():
            break
        time.sleep(0.1)
    process.send_signal(kind)
    assert process.wait(60) == 130
    assert json.loads((tmp_path / "X" / "summary.json").read_text())["status"] == "interrupted"


def test_a_launcher_runs_jobs_elsewhere(empty_folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    arguments = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *CHEAP]
    assert code_of([*arguments, "drafter=mtp_vanilla", "drafter.num_draft_tokens=1,5"]) == 2
    assert sorted(statuses(empty_folder)) == ["finished", "refused"]


def test_options_of_ones_own(runner: FakeRunner, empty_folder: Path) -> None:
    (empty_folder / "conf" / "drafter").mkdir(parents=True)
    (empty_folder / "conf" / "drafter" / "mine.yaml").write_text("defaults: [ngram, _self_]\nmax_ngram: 7\n")
    assert main(["--config-dir", "conf", "drafter=mine"]) == 0
    [(config, choices, _)] = runner.calls
    assert (config.drafter.max_ngram, choices["drafter"]) == (7, "mine+max_ngram=7")


@pytest.mark.parametrize(
    ("overrides", "group", "name"),
    [
        (["prune=catchup"], "prune", "catchup"),
        (["prune.catchup=pre_attention"], "prune", "none+catchup=pre_attention"),
        (["acceptance=relaxed_thinking", "acceptance.topk=3"], "acceptance", "relaxed_thinking+topk=3"),
        (["graph=full_loop", "graph.verify=false"], "graph", "full_loop+verify=False"),
        (["sampling.temperature=0.7"], "sampling", "greedy+temperature=0.7"),
        (["drafter=ngram", "drafter.num_draft_tokens=5"], "drafter", "ngram"),
        (["target=hf", "target.path=/models/Qwen3-1.7B"], "target", "hf+path=Qwen3-1.7B"),
        (["engine=vllm", "engine.target=/home/me/x/"], "engine", "vllm+target=x"),
        (["engine=vllm", "+engine.options.file='/home/me/x'"], "engine", "vllm+options=x'}"),
        (["engine=vllm", f"engine.head={'x' * 200}"], "engine", f"vllm+head={'x' * 110}"),
        (["logger=wandb", "logger.project=p"], "logger", "wandb"),
        (["kernels=torch"], "graph", "auto"),
    ],
)
def test_a_choice_is_named_by_its_option_and_what_differs(overrides: list[str], group: str, name: str) -> None:
    assert compose(overrides).choices[group] == name


def test_a_composed_run_may_be_changed_and_several_are_none(empty_folder: Path, runner: FakeRunner) -> None:
    composed = spec_lab.compose(["drafter=ngram"])
    composed.config.batch_size = 2
    first, second = spec_lab.run(composed), spec_lab.run(composed)
    assert [config.batch_size for config, _, _ in runner.calls] == [2, 2]
    assert second.folder.name == f"{first.folder.name}-2"
    for overrides in (["experiment=drafters"], ["drafter=ngram,eagle3"], ["batchsize=1"]):
        with pytest.raises(UserError):
            spec_lab.compose(overrides)


def test_flags_come_behind_the_overrides() -> None:
    """Hydra does not take them between overrides."""
    assert extensions_in(["seed=1", "extensions=[a,b]"]) == ("a", "b")
    assert prepared(["-m", "seed=1,2", "--config-dir", "x", "batch_size=2"]) == [
        *("seed=1,2", "batch_size=2"),
        *("-m", "--config-dir", "x"),
    ]


def test_a_run_that_shares_its_device_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = (Company(torch.device("cpu")) for _ in range(2))
    assert first.seen() and second.seen(), "the second one began while the first one ran"
    assert not Company(torch.device("cpu")).seen()


def test_a_killed_run_keeps_the_requests_that_ended(tmp_path: Path) -> None:
    arguments = ["hydra.run.dir=X", "max_new_tokens=700", "kernels=torch", "references=[]", "workload.limit=3"]
    command = [sys.executable, "-m", "spec_lab", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    requests = tmp_path / "X" / "requests.jsonl"
    for _ in range(600):
        if requests.exists() and requests.read_bytes():
            break
        time.sleep(0.1)
    process.kill()
    process.wait(60)
    recorded, rows = read_run(tmp_path / "X"), read_requests(tmp_path / "X")
    assert recorded.status == "interrupted" and recorded.reason == STILL_RUNNING
    assert 1 <= len(rows) <= 3 and all(row.output_ids for row in rows)
