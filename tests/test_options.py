"""Every option of every group, as the command line composes it, builds and runs: on a tiny pair, two requests each."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab import build
from spec_lab.cli.compose import compose_run
from spec_lab.cli.options import read_groups
from spec_lab.compatibility import refusals
from spec_lab.runner import run
from spec_lab.workloads.load import PROMPTS_FOLDER
from tests.tiny_runs import make_runnable_pair

GROUPS_WITHOUT_PARTS = ("experiment", "size", "debug")
OPTIONS = [
    (group.name, option)
    for group in read_groups().values()
    if group.name not in GROUPS_WITHOUT_PARTS
    for option in group.options
]
SAMPLED = ["acceptance=rejection", "sampling=sampled", "drafter.draft_sampling=distribution"]
NEEDS = {
    ("acceptance", "rejection"): SAMPLED,
    ("sampling", "sampled"): SAMPLED,
    ("workload", "jsonl"): [f"workload.path={PROMPTS_FOLDER / 'dates.jsonl'}"],
    ("workload", "spec_bench"): ["workload.path=question.jsonl"],
    ("logger", "wandb"): ["logger.mode=disabled"],
}
CHEAP = [
    *("max_new_tokens=6", "repeats=1", "warmup_requests=0", "profile_rounds=0", "num_threads=1", "batch_size=2"),
    *("references=[plain]", "workload.limit=2", "device=cpu"),
]
QUESTIONS = "\n".join(f'{{"question_id": {i}, "category": "writing", "turns": ["Hello {i}", "And?"]}}' for i in (1, 2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Room for the shipped prompts: the tokenizer spends a token a character."""
    return make_runnable_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=8192)


def target_overrides(group: str, option: str, pair: tuple[Path, Path]) -> list[str]:
    """The shipped target where that is the option, else the tiny pair, with its head where one is read."""
    if (group, option) == ("target", "pocket"):
        return []
    head = [f"drafter.path={pair[1]}"] if group != "drafter" or option == "eagle3" else []
    return ["target=hf", f"target.path={pair[0]}", *head]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_builds_and_runs(group: str, option: str, pair: tuple[Path, Path], empty_folder: Path) -> None:
    if (group, option) == ("target", "pocket") and not build.ZOO.is_dir():
        pytest.skip("this checkout has no shipped weights")
    (empty_folder / "question.jsonl").write_text(QUESTIONS)
    chosen = [f"{group}={option}", *NEEDS.get((group, option), []), *target_overrides(group, option, pair), *CHEAP]
    config, choices = compose_run(list(dict.fromkeys(chosen)))
    assert refusals(config) == []

    summary = run(config, choices, empty_folder / "run")

    assert choices[group] == option
    assert (summary["status"], summary["num_requests"]) == ("finished", 2)
    assert summary["num_draft_tokens"] == config.drafter.num_draft_tokens
    assert summary["output_tokens"] > 2
    assert summary["divergence"] is None or summary["divergence"]["bugs"] == 0


def test_a_draft_option_that_breaks_losslessness_runs_when_allowed_and_is_recorded(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    lossy = ["acceptance=rejection", "sampling=sampled", "acceptance.allow_lossy=true"]
    target = ["target=hf", f"target.path={pair[0]}", f"drafter.path={pair[1]}"]
    config, choices = compose_run([*lossy, *target, *CHEAP])
    assert refusals(config) == []
    assert run(config, choices, tmp_path / "run")["acceptance_lossless"] is False
