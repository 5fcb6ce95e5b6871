"""`python -m spec_lab.sweep` over a runner that decodes nothing: what runs, in which order, and what it leaves."""

from __future__ import annotations

import fcntl
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from spec_lab.core.errors import UserError
from spec_lab.menu.chosen import Chosen
from spec_lab.program.sweep_lock import SweepLock
from spec_lab.record.runs import find_runs, load_runs
from spec_lab.record.scalars import scalar, scalar_paths, scalars
from spec_lab.sweep.__main__ import main
from spec_lab.sweep.file import read_sweep_file
from spec_lab.sweep.search import Search, Tried
from tests import recorded_runner
from tests.fake_runs import make_summary

pytestmark = pytest.mark.usefixtures("search_code")

COMMAND = ["${env}", "${interpreter}", "-m", "spec_lab", "profile_rounds=0", "${args_no_hyphens}"]
GRID: dict[str, Any] = {
    "method": "grid",
    "metric": {"name": "summary.acceptance_length", "goal": "maximize"},
    "parameters": {"drafter.num_draft_tokens": {"values": [1, 3]}, "seed": {"values": [4, 5]}},
    "command": COMMAND,
}
PAIR = GRID | {"parameters": {"drafter.num_draft_tokens": {"values": [1, 3]}, "seed": {"value": 4}}}
RANDOM = GRID | {
    "method": "random",
    "run_cap": 2,
    "parameters": {
        "seed": {"min": 0, "max": 10**6},
        "sampling.temperature": {"distribution": "uniform", "min": 0.5, "max": 1.5},
        "sampling.top_p": {"distribution": "q_uniform", "min": 0.5, "max": 1.0, "q": 0.1},
        "acceptance": {"value": "rejection"},
    },
}
BAYES = GRID | {
    "method": "bayes",
    "run_cap": 3,
    "parameters": {"drafter.num_draft_tokens": {"min": 1, "max": 8}, "seed": {"min": 0, "max": 1000}},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parameters of the runs that really ran."""
    made: list[dict[str, Any]] = []
    module = recorded_runner.stand_in()

    def run(chosen: Chosen, choices: dict[str, str], folder: Path) -> Any:
        config = chosen.config
        made.append({"seed": config.seed, "K": config.drafter.num_draft_tokens, "config": config})
        return recorded_runner.run(chosen, choices, folder)

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", module)
    return made


@pytest.fixture
def write(empty_folder: Path) -> Iterator[Any]:
    def write(config: dict[str, Any], name: str = "x.yaml") -> str:
        Path(name).write_text(yaml.safe_dump(config))
        return name

    return write


def proposals() -> list[dict[str, Any]]:
    [path] = Path("outputs").glob("*/proposals.json")
    return list(json.loads(path.read_text())["proposals"])


def test_grid_runs_every_combination_and_shows_the_best_first(
    calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(GRID), "batch_size=2", "logger=wandb", "logger.mode=disabled"]) == 0
    assert [(call["K"], call["seed"]) for call in calls] == [(1, 4), (1, 5), (3, 4), (3, 5)]
    assert {call["config"].batch_size for call in calls} == {2}
    assert {call["config"].profile_rounds for call in calls} == {0}
    out = capsys.readouterr().out
    *_, counts, folder = out.splitlines()
    assert counts == "4 runs: 4 finished"
    assert Path(folder).parent == Path("outputs")
    assert {call["config"].logger.group for call in calls} == {Path(folder).name}
    assert Path(folder).name.startswith("x-sweep-")
    assert json.loads((Path(folder) / "sweep.json").read_text()) == {"jobs": 4, "finished": 4}
    header, _, best, *rest = out.splitlines()[out.splitlines().index(counts) - 6 : -2]
    assert header.split() == ["run", "num_draft_tokens", "seed", "summary.acceptance_length", "status"]
    lengths = [float(line.split()[3]) for line in (best, *rest)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(find_runs([Path(folder)])) == 4


def test_finished_sweep_is_shown_and_not_repeated(
    calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [write(PAIR)]
    assert main(command) == 0
    first = capsys.readouterr().out.splitlines()[-6:]
    assert main(command) == 0
    assert len(calls) == 2
    assert capsys.readouterr().out.splitlines()[-6:] == first
    assert main([*command, "--fresh"]) == 0
    assert len(calls) == 4
    assert main([*command, "logger=wandb", "logger.mode=disabled", "logger.group=another"]) == 0
    assert len(calls) == 6, "another override is another sweep"


def test_what_auto_takes_for_some_runs_alone_is_said(
    calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_lab.menu.auto.problem_of_native", lambda: None)
    dtypes = GRID | {"parameters": {"dtype": {"values": ["float32", "bfloat16"]}}}
    assert main([write(dtypes), "device=cpu"]) == 0
    assert [str(call["config"].kernels) for call in calls] == ["native", "torch"]
    assert (
        capsys.readouterr().err.count("auto took for some of these runs kernels=native and for others kernels=torch")
        == 1
    )


def test_same_seed_same_parameters_and_plain_values(calls: list[dict[str, Any]], write: Any) -> None:
    name = write(RANDOM)
    assert main([name, "drafter.draft_sampling=distribution", "--seed", "1"]) == 0
    searches = [Search(read_sweep_file(Path(name)), seed) for seed in (0, 1)]
    other, same = ([search.propose(number, []) for number in range(2)] for search in searches)
    assert proposals() == same
    assert all(one != another for one, another in zip(same, other, strict=True))
    assert len({parameters["seed"] for parameters in proposals()}) == 2
    for parameters in proposals():
        assert {name: type(value) for name, value in parameters.items()} == {
            "acceptance": str, "seed": int, "sampling.temperature": float, "sampling.top_p": float,
        }  # fmt: skip


def test_run_cap_and_count_both_hold_and_a_larger_count_goes_on(calls: list[dict[str, Any]], write: Any) -> None:
    name = write(BAYES)
    assert main([name, "--count", "2"]) == 0
    assert len(calls) == 2
    before = proposals()
    assert main([name, "--count", "9"]) == 0
    assert len(calls) == 3, "run_cap is 3"
    assert proposals()[:2] == before


def test_bayes_is_told_the_metric_and_the_goal(write: Any) -> None:
    """After ten results that grow with K, it asks for a large K when maximizing, and a small one when minimizing."""
    proposed = {}
    for goal in ("maximize", "minimize"):
        config = BAYES | {"metric": {"name": "summary.acceptance_length", "goal": goal}}
        config["parameters"] = {"drafter.num_draft_tokens": {"min": 1, "max": 100}}
        search = Search(read_sweep_file(Path(write(config))), seed=0)
        tried = [Tried({"drafter.num_draft_tokens": k}, "finished", k / 10) for k in range(5, 100, 10)]
        asked = [search.propose(number, tried) for number in range(10, 15)]
        proposed[goal] = sorted(parameters["drafter.num_draft_tokens"] for parameters in asked if parameters)[2]
    assert proposed["maximize"] > 80
    assert proposed["minimize"] < 20


def test_runs_without_the_metric_do_not_stop_the_search(write: Any) -> None:
    search = Search(read_sweep_file(Path(write(BAYES))), seed=0)
    point = {"drafter.num_draft_tokens": 2, "seed": 3}
    tried = [Tried(point, "refused", None), Tried(point, "finished", None), Tried(point, "interrupted", None)]
    assert search.propose(3, tried)
    assert search.propose(4, [*tried, Tried(point, "finished", 2.0), Tried(point, "failed", None)])


def test_a_metric_that_no_run_has_is_said_once(
    calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PAIR | {"metric": {"name": "summary.distance.kl", "goal": "maximize"}}
    assert main([write(config)]) == 0
    assert capsys.readouterr().err.count("run 1 has no summary.distance.kl") == 1


def test_search_leaves_the_global_generators_alone(write: Any) -> None:
    search = Search(read_sweep_file(Path(write(BAYES))), seed=0)
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    search.propose(0, [])
    assert (random.random(), np.random.random()) == expected


def test_sweep_ends_when_the_target_is_met(calls: list[dict[str, Any]], write: Any) -> None:
    config = GRID | {"metric": {"name": "summary.acceptance_length", "goal": "maximize", "target": 1.65}}
    assert main([write(config)]) == 0
    assert len(calls) == 2
    calls.clear()
    config["metric"] = {"name": "summary.acceptance_length", "goal": "minimize", "target": 0.1}
    assert main([write(config), "--count", "2"]) == 0
    assert len(calls) == 2


def test_refused_runs_are_recorded_and_the_sweep_goes_on(
    calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GRID | {"parameters": {"drafter": {"values": ["none", "ngram"]}, "drafter.max_ngram": {"value": 3}}}
    assert main([write(config)]) == 2
    assert len(calls) == 1
    captured = capsys.readouterr()
    assert "2 runs: 1 refused, 1 finished" in captured.out
    assert len(captured.err.splitlines()) == 1


def test_failed_run_runs_again_and_the_proposals_stay(
    calls: list[dict[str, Any]], write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, working = write(BAYES), sys.modules["spec_lab.measure.runner"].run

    def failing(config: Any, choices: dict[str, str], folder: Path) -> Any:
        if len(calls) == 1:
            calls.append({})
            raise RuntimeError("out of luck")
        return working(config, choices, folder)

    monkeypatch.setattr(sys.modules["spec_lab.measure.runner"], "run", failing)
    assert main([name]) == 1
    before = proposals()
    assert main([name]) == 0
    assert proposals() == before
    assert len(calls) == 4
    [folder] = Path("outputs").iterdir()
    assert sorted(load_runs(folder)["status"]) == ["failed", *["finished"] * 3]


def test_interrupted_sweep_goes_on(calls: list[dict[str, Any]], write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, working = write(PAIR), sys.modules["spec_lab.measure.runner"].run

    def interrupted(config: Any, choices: dict[str, str], folder: Path) -> Any:
        if len(calls) == 1:
            raise KeyboardInterrupt
        return working(config, choices, folder)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["spec_lab.measure.runner"], "run", interrupted)
        assert main([name]) == 130
    assert main([name]) == 0
    assert [(call["K"], call["seed"]) for call in calls] == [(1, 4), (3, 4)]


def test_same_sweep_twice_at_once_is_one_line(
    calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [write(PAIR), "--count", "1"]
    assert main(command) == 0
    [folder] = Path("outputs").iterdir()
    lock = SweepLock(folder)
    lock.take()
    capsys.readouterr()
    assert main([*command[:-1], "2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "another process is running" in line
    lock.release()
    assert main([*command[:-1], "2"]) == 0
    assert len(calls) == 2


def test_lock_of_a_file_that_its_holder_just_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the second process's opening and locking, the first one ends and a third one takes the lock."""
    first, second, third = (SweepLock(tmp_path) for _ in range(3))
    first.take()
    flock = fcntl.flock

    def slow(file: Any, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", flock)
        first.release()
        third.take()
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", slow)
    with pytest.raises(UserError, match="another process"):
        second.take()


def test_broken_ledger_is_one_line(calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = [write(GRID), "--count", "1"]
    assert main(command) == 0
    [path] = Path("outputs").glob("*/proposals.json")
    for text in ("", "{}", '{"proposals": 3}', '{"proposals": [3]}', "[" * 9999):
        path.write_text(text)
        capsys.readouterr()
        assert main(command) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "proposals.json: not the proposals of a sweep" in line


def test_what_a_run_does_not_read_starts_no_sweep_over(
    calls: list[dict[str, Any]], write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A commit of a document or a saved notebook is none of its business; another version of the lab is."""
    name = write(PAIR | {"parameters": {"seed": {"value": 4}, "drafter.num_draft_tokens": {"values": [1]}}})
    for revision, version in (("1234567", "1"), ("1234567+dirty", "1"), ("89abcde", "2"), ("1234567", "1")):
        monkeypatch.setattr("spec_lab.record.provenance.git_revision", lambda revision=revision: revision)
        monkeypatch.setattr("spec_lab.core.version.VERSION", version)
        assert main([name]) == 0
        said = "starts over in outputs/" in capsys.readouterr().err
        assert said == (version == "2")
    assert len(list(Path("outputs").iterdir())) == 2
    assert len(calls) == 2


def test_table_of_many_parameters_fits_a_terminal(
    calls: list[dict[str, Any]], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("cache.prefill_chunk", "warmup_requests", "max_new_tokens", "batch_size", "repeats")
    long = {key: {"values": [7]} for key in keys}
    assert main([write(GRID | {"parameters": GRID["parameters"] | long}), "--count", "1"]) == 0
    out = capsys.readouterr().out
    table = out[out.index("run  ") :].splitlines()
    assert max(map(len, table)) <= 80
    assert "not shown: " in out


def test_numbers_of_a_record_have_names() -> None:
    summary = make_summary()
    names = scalar_paths()
    assert {"summary.speedup", "summary.speedup.low", "summary.acceptance_length", "summary.accuracy"} <= set(names)
    assert {"summary.latency_ms.ttft.p50", "summary.divergence.bugs", "summary.decode_tokens_per_second"} <= set(names)
    assert not {name for name in names if "config" in name or "num_threads" in name or "schema_version" in name}
    assert summary["speedup"] is not None
    assert scalar(summary, "summary.speedup") == summary["speedup"]["value"]
    assert all(isinstance(value, (int, float)) for value in scalars(summary).values())
    assert "summary.speedup" not in scalars(make_summary(references={}))
