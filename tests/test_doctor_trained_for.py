"""A head beside a target that is not the one that it was trained for: rounded to 4 bits, or with other weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.app.compose import compose
from spec_lab.checkpoints.digest import target_digest
from spec_lab.checkpoints.packaged import ZOO
from spec_lab.doctor.evidence import Evidence, gather, run_loop
from spec_lab.doctor.findings import Verdict
from spec_lab.doctor.subject import load_subject
from spec_lab.doctor.trained_for import check_precision, check_training
from spec_lab.train.truth import figures

Change = Callable[[str, torch.Tensor], torch.Tensor]


def evidence_of(*overrides: str) -> Evidence:
    words = ["max_new_tokens=24", "device=cpu", "batch_size=9", "drafter=eagle3", *overrides]
    subject = load_subject(compose(words).config)
    evidence = gather(subject, run_loop(subject))
    assert evidence is not None
    return evidence


def changed_target(folder: Path, change: Change) -> str:
    """Copy the shipped target, with other weights; return the override that names it."""
    shutil.copytree(ZOO / "pocket", folder)
    tensors = {name: change(name, tensor.float()) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return f"target=hf target.path={folder} drafter.path={ZOO / 'pocket-eagle3'}"


def outlying(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Make every 16th input of a product 12 times as small and its weights as large, as in large models. In float32
    this changes nothing. In groups of 128 it leaves 4 bits to no other input."""
    factors = torch.ones(256)
    factors[::16] = 12.0
    if name.endswith("layernorm.weight"):
        return tensor / factors
    return tensor * factors if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") else tensor


def test_a_head_of_the_wide_target_is_told_beside_four_bits(tmp_path: Path) -> None:
    target = changed_target(tmp_path / "target", outlying).split()
    finding = check_precision(evidence_of(*target, "target.weight_dtype=int4"))
    assert finding.verdict is Verdict.FAULT
    assert finding.cause is not None and "target.weight_dtype=int4 cache.dtype=auto costs it 1." in finding.cause
    assert check_precision(evidence_of(*target)).verdict is Verdict.DOES_NOT_APPLY


def test_four_bits_that_cost_nothing_are_no_fault() -> None:
    finding = check_precision(evidence_of("target.weight_dtype=int4", "cache.dtype=fp8"))
    assert finding.verdict is Verdict.OK and "with the target as it is stored 0.46" in finding.measured


def test_one_prompt_is_no_evidence_of_a_precision() -> None:
    finding = check_precision(evidence_of("target.weight_dtype=int4", "workload.limit=1", "max_new_tokens=96"))
    assert finding.verdict is Verdict.DOES_NOT_APPLY and "fewer than 8 prompts" in finding.measured


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped head, with the record that a training would have left of it."""
    folder = Path(shutil.copytree(ZOO / "pocket-eagle3", tmp_path_factory.mktemp("head") / "head"))
    then = figures(run_loop(evidence_of().subject).records, 3)
    facts = {
        "target": {"path": "pocket", "target": target_digest(ZOO / "pocket")},
        "points": [{"step": 7, "decoded": {}}, {"step": 8, "decoded": then}],
        "best_step": 8,
    }
    (folder / "training.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize(("noise", "verdict"), [(0.001, Verdict.OK), (0.35, Verdict.FAULT)])
def test_a_head_of_other_weights_is_told_by_its_training(
    head: Path, tmp_path: Path, noise: float, verdict: Verdict
) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + noise * torch.randn(tensor.shape, generator=generator))

    target = changed_target(tmp_path / "target", noisy).split()
    finding = check_training(evidence_of(*target, f"drafter.path={head}"))
    assert finding.verdict is verdict
    assert (finding.cause is None) == (verdict is Verdict.OK)


def test_a_head_of_this_target(head: Path) -> None:
    assert check_training(evidence_of(f"drafter.path={head}")).measured.endswith("this one")
    assert check_training(evidence_of()).verdict is Verdict.DOES_NOT_APPLY
