"""The doctor finds nothing in drafters that the trainer has just made, for a target whose texts are soon learnt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from spec_lab.app.compose import compose
from spec_lab.core.types import Request
from spec_lab.doctor.examine import examine
from spec_lab.doctor.findings import faults
from spec_lab.doctor.subject import load_subject, strict_greedy
from spec_lab.menu.chosen import choose
from spec_lab.train.checks import sizes_of
from spec_lab.train.fitting import filled
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.packed_training import PackedTask
from spec_lab.train.serving import Serving
from spec_lab.train.texts.folder import Texts
from tests.taught_pairs import quiet
from tests.test_train_heads import CPU, RECIPES, write_texts
from tests.tiny_checkpoints import make_tiny_target

STEPS = OptimisationConfig(
    num_steps=60, batch_size=16, peak_learning_rate=0.01, num_warmup_steps=4, log_every=60, checkpoint_every=99
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token follows mostly from its last one, and texts that it wrote."""
    path = tmp_path_factory.mktemp("examined")
    make_tiny_target(path / "target", "llama")
    quiet(path / "target", 0.1)
    serving = Serving.load(path / "target", CPU, "float32", 3, 16, 24)
    prompts = torch.randint(3, 160, (160, 4), generator=torch.Generator().manual_seed(5)).tolist()
    requests = [Request(str(index), "x", tuple(prompt), 20, ignore_eos=True) for index, prompt in enumerate(prompts)]
    written = [[*record.prompt_ids, *record.output_ids] for record in serving.decode("none", None, requests)]
    write_texts(path / "target", path / "texts", written)
    return path


@pytest.mark.parametrize("name", ["dspark", "p_eagle"])
def test_the_doctor_finds_no_fault_in_what_was_trained(folder: Path, tmp_path: Path, name: str) -> None:
    """Shipped heads of other forms are healthy in `test_doctor_faults.py` and `test_doctor_trees.py`; that
    a tiny one is served as it was trained is proved in `test_train_heads.py`."""
    target, texts = FrozenTarget.load(folder / "target", CPU, torch.float32, 256), Texts.load(folder / "texts")
    given = RECIPES[name].config
    if getattr(given, "draft_vocab_size", None) is not None:
        given = dataclasses.replace(given, draft_vocab_size=150)
    sizes = filled(dataclasses.replace(given, optimisation=STEPS), sizes_of(target.config))
    recipe = type(RECIPES[name])(sizes)
    drafter = recipe.build(target, texts, 0)
    task = PackedTask(target, texts, recipe.taps(target), 48, tmp_path / "no.pt", 0, CPU)
    recipe.form.train(drafter, recipe.config, task)
    recipe.save(drafter, target, tmp_path / name)
    run = ["target=hf", f"target.path={folder / 'target'}", f"drafter={name}", f"drafter.path={tmp_path / name}"]
    run += ["drafter.num_draft_tokens=2", "workload=random_ids", "workload.limit=3", "max_new_tokens=24", "device=cpu"]
    found = examine(load_subject(choose(strict_greedy(compose(run).config))))
    assert faults(found) == []
    assert found[-1].check == "teacher forcing"
