"""Every study of `conf/experiment`: its lines compose, its jobs run, and its tables and figures can be made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec_lab.__main__ import main
from spec_lab.app.compose import compose, conf_folder
from spec_lab.config.checks import problems
from spec_lab.config.run import Run
from spec_lab.record.reading import find_runs
from spec_lab.study.figures import svg
from spec_lab.study.studies import studies_in, study_figures, study_tables
from tests import recorded_runner
from tests.fake_runner import code_of

FILES = {path.stem: path for path in sorted((conf_folder() / "experiment").glob("*.yaml")) if path.stem != "search_k"}
"""All but the search, which has a test of its own: it has no grid and no tables."""
CELLS: dict[str, tuple[list[str], int]] = {
    "quantised": (["line=float32,kv_fp8", "drafter=eagle3"], 2),
    "planner": (["line=greedy,sampled", "batch_size=1"], 2),
    "batch_scaling": (["batch_size=16"], 2),
    "drafters": (["drafter=ngram,eagle3", "drafter.num_draft_tokens=3"], 2),
    "graph_modes": (["graph=eager,round_overlap"], 4),
    "lossy": (["line=one_hot,fuzzy0.2"], 2),
    "paper": (["line=eagle3,eagle3_T1"], 2),
    "prefill_outputs": (["workload.prompt_tokens=64"], 2),
    "pruning": (["prune=none,catchup", "drafter.num_draft_tokens=3"], 2),
    "relaxed_thinking": (["line=strict,top10_delta0.2", "drafter.num_draft_tokens=1"], 2),
    "sampling": (["sampling.temperature=0.4"], 3),
    "serving": (["batch_size=1,16"], 2),
    "trees": (["line=static,chain7", "batch_size=1"], 2),
}
"""Some values of each study, and how many runs they are."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> list[Any]:
    """The configurations that a runner which decodes nothing was given."""
    configs: list[Any] = []

    def run(chosen: Run, choices: dict[str, str], folder: Path, last: Any = None) -> Any:
        configs.append(chosen)
        return recorded_runner.run(chosen, choices, folder)

    module = recorded_runner.stand_in()
    module.record_run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", module)
    return configs


@pytest.mark.parametrize("name", FILES)
def test_a_study_runs_its_lines_and_shows_its_tables_and_figures(
    name: str, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    some, num_runs = CELLS[name]
    assert main([f"experiment={name}", *some]) == 0
    assert len(ran) == num_runs
    [(spec, runs)] = studies_in(find_runs("outputs"))
    assert len(runs) == num_runs and spec["question"] in capsys.readouterr().out
    if "line" in some[0]:
        assert {found.run.choices["line"] for found in runs} == set(some[0].partition("=")[2].split(","))
    tables = study_tables(spec, runs)
    shown = set(spec["tables"] or ["knobs"]) - {"reliability", "plan"}
    assert len(tables) == len(shown), "no run has confidences or costs"
    for draw in study_figures(spec, runs).values():
        assert svg(draw()).startswith("<svg")


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("name", FILES)
def test_every_value_of_a_study_composes_and_is_not_refused(name: str, size: str) -> None:
    """Each value once, beside the first of the others; only mtp_vanilla has too few modules for K=5."""
    whole = [f"experiment={name}", f"size={size}", "hydra.mode=RUN"]
    params = swept(name, size)
    for key, values in params.items():
        for value in values:
            others = {other: each[0] for other, each in params.items()} | {key: value}
            config = compose([*whole, *(f"{k}={v}" for k, v in others.items())]).config
            assert list(problems(config)) == [], others


def swept(name: str, size: str) -> dict[str, list[str]]:
    """The values of each key that a study sweeps at a size."""
    params = yaml.safe_load(FILES[name].read_text())["hydra"]["sweeper"]["params"]
    texts = {key: str(value) for key, value in params.items()}
    chosen = {}
    for key, text in texts.items():
        if text.startswith("${by_size:"):
            small, full = (part.strip("'") for part in text.removeprefix("${by_size:").removesuffix("}").split("','"))
            text = full if size == "full" else small
        chosen[key] = [value.strip() for value in text.split(",")]
    return chosen


def test_what_is_typed_replaces_what_the_study_sweeps(ran: list[Any]) -> None:
    assert main(["experiment=trees", "line=static,chain7", "batch_size=1", "max_new_tokens=5"]) == 0
    assert sorted((config.tree.name, config.drafter.num_draft_tokens) for config in ran) == [("none", 7), ("static", 3)]
    assert {config.max_new_tokens for config in ran} == {5}


def test_optuna_searches_for_the_objective_and_goes_on_where_it_was(ran: list[Any]) -> None:
    """A refused trial ends nothing, and the trials of the first call are not run again."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra `optuna`")
    space = ["drafter.num_draft_tokens=choice(1,3,40)", "hydra.sweeper.sampler.seed=2"]
    assert code_of(["experiment=search_k", "hydra.sweeper.n_trials=3", *space]) == 2
    assert sorted(config.drafter.num_draft_tokens for config in ran) == [1, 3]
    assert code_of(["experiment=search_k", "hydra.sweeper.n_trials=4", *space]) == 2
    assert len(ran) == 2
    [folder] = Path("outputs").iterdir()
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    finished = [found.run for found in find_runs(folder) if found.run.status == "finished"]
    speedups = {run.config["drafter"]["num_draft_tokens"]: run["speedup"] for run in finished}
    assert len(set(speedups.values())) == 2
    assert best["best_value"] == max(speedups.values())
    assert speedups[best["best_params"]["drafter.num_draft_tokens"]] == best["best_value"]


def test_a_study_of_ones_own_needs_one_file(ran: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\nname: mine\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {line: 'a,b'}\n"
        "study:\n  question: Which?\n  lines:\n    a: [drafter=ngram]\n"
        "    b: [drafter=eagle3, drafter.num_draft_tokens=2]\n"
        "  keys: {line: line}\n  columns: {length: acceptance_length}\n"
    )
    assert main(["--config-dir", str(tmp_path / "own"), "experiment=mine"]) == 0
    assert [(config.drafter.name, config.drafter.num_draft_tokens) for config in ran] == [("ngram", 3), ("eagle3", 2)]
    [(spec, runs)] = studies_in(find_runs("outputs"))
    assert study_tables(spec, runs)[0].shown["line"].tolist() == ["a", "b"]
