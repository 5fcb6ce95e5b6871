"""The doctor finds nothing in drafters that the trainer has just made, for a target whose texts are soon learnt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.app.compose import compose
from spec_lab.core.types import Request
from spec_lab.doctor.examine import examine
from spec_lab.doctor.findings import faults
from spec_lab.doctor.subject import load_subject, strict_greedy
from spec_lab.train.serving import Serving
from spec_lab.train.target import FrozenTarget
from tests.taught_pairs import quiet
from tests.tiny_checkpoints import make_tiny_target
from tests.train_lab import CPU, HEADS, losses, record_run, texts_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token follows mostly from its last one, and texts that it wrote."""
    path = tmp_path_factory.mktemp("examined")
    make_tiny_target(path / "target", "llama")
    quiet(path / "target", 0.1)
    serving = Serving.load(path / "target", CPU, 3, 24, "batch_size=16", "dtype=float32")
    prompts = torch.randint(3, 160, (160, 4), generator=torch.Generator().manual_seed(5)).tolist()
    requests = [Request(str(index), "x", tuple(prompt), 20, ignore_eos=True) for index, prompt in enumerate(prompts)]
    written = serving.decode("none", None, requests)
    texts = [(record.request_id, record.prompt_ids, record.output_ids) for record in written]
    record_run(path / "texts", path / "target", texts)
    return path


@pytest.mark.parametrize("name", ["dspark", "p_eagle"])
def test_the_doctor_finds_no_fault_in_what_was_trained(folder: Path, tmp_path: Path, name: str) -> None:
    """Shipped heads of other forms are healthy in `test_doctor_faults.py` and `test_doctor_trees.py`; that
    a tiny one is served as it was trained is proved in `test_train_heads.py`."""
    target, texts = FrozenTarget.load(folder / "target", CPU, torch.float32, 256), texts_of(folder / "texts")
    head: Any = dataclasses.replace(HEADS[name], draft_vocab_size=None if name == "dspark" else 150)  # type: ignore[call-arg]
    knobs = {"batch_size": 16, "peak_learning_rate": 0.01, "num_warmup_steps": 4}
    module, _ = losses(head, target, texts, tmp_path / "no.pt", num_steps=60, **knobs)
    head.save(module, target, tmp_path / name)
    run = ["target=hf", f"target.path={folder / 'target'}", f"drafter={name}", f"drafter.path={tmp_path / name}"]
    run += ["drafter.num_draft_tokens=2", "workload=random_ids", "workload.limit=3", "max_new_tokens=24", "device=cpu"]
    found = examine(load_subject(strict_greedy(compose(run).config)))
    assert faults(found) == []
    assert found[-1].check == "teacher forcing"
