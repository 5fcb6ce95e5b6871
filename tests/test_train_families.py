"""`python -m spec_lab.train debug=smoke` for targets of other families: every stage, and drafts by what it
left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_lab.app.compose import compose
from spec_lab.train.loop import learning_rate
from spec_lab.train.module_config import OptimisationConfig
from tests.test_shipped_targets import decode
from tests.test_train_pipeline import composed_config, smoke_pipeline

PAIRS = {
    "pocket_hybrid": ("nextn", "mtp_eagle"),
    "pocket_gemma": ("assistant", "frozen_kv"),
    "pocket_moe": ("nextn", "mtp_eagle"),
}


@pytest.mark.parametrize("target", PAIRS)
def test_a_pair_is_trained_and_runs(target: str, tmp_path: Path) -> None:
    drafter, drafts_as = PAIRS[target]
    folder = smoke_pipeline(tmp_path / "train", f"target={target}", f"drafter={drafter}").run()
    head = folder.drafter(drafts_as)
    assert folder.target.name == target and head.name == f"{target}-{drafts_as}"
    card = (head / "README.md").read_text()
    assert f"python -m spec_lab.train target={target} drafter={drafter}" in card
    assert "rows that the target learned from" in card
    assert json.loads(folder.evaluation(head).read_text())["pooled"]["prompts"] == 9
    run = [f"target=hf target.path={folder.target} workload=pocket max_new_tokens=8 workload.limit=3 device=cpu"]
    drafted, plain = (
        decode(compose(" ".join([*run, drafter]).split()).config)
        for drafter in (f"drafter={drafts_as} drafter.path={head}", "drafter=none")
    )
    assert len(plain) == 3 and drafted == plain


def test_the_clock_ends_a_training_where_steps_would_not() -> None:
    timed = OptimisationConfig(num_steps=1000, num_warmup_steps=100, peak_learning_rate=1.0, max_seconds=10.0)
    untimed = OptimisationConfig(num_steps=1000, num_warmup_steps=100, peak_learning_rate=1.0)
    assert learning_rate(timed, 550, 1.0) == learning_rate(untimed, 550, 1.0) == pytest.approx(0.5)
    assert learning_rate(timed, 200, 5.5) == pytest.approx(0.5)
    assert learning_rate(timed, 200, 10.0) == 0.0
    assert learning_rate(timed, 49, 0.0) == pytest.approx(0.5)


@pytest.mark.parametrize("target", PAIRS)
def test_a_recipe_ends_within_eight_minutes(target: str) -> None:
    config = composed_config(f"target={target}", f"drafter={PAIRS[target][0]}")
    assert config.trained_target is not None and config.trained_drafter is not None
    clocks = [part.optimisation.max_seconds for part in (config.trained_target, config.trained_drafter)]
    assert sum(seconds or 10**9 for seconds in clocks) <= 440
