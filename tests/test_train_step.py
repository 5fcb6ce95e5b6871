"""A training step: what it reads of a batch, what it moves, and that a captured one trains as a launched one does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spec_lab.train.config import Optimisation, Optimiser
from spec_lab.train.group import ALONE
from spec_lab.train.optimisers import adamw
from spec_lab.train.step import STEPS_BEFORE_CAPTURE, Step
from spec_lab.train.target import FrozenTarget
from tests.test_train_loop import CPU, OPTIMISATION, Batches, Regression, as_they_are
from tests.tiny_checkpoints import make_tiny_target
from tests.train_lab import HEADS, losses, record_run, texts_of


def make_step(module: nn.Module, knobs: Optimisation) -> Step:
    return Step(module, as_they_are, module, knobs, ALONE, in_16_bits=False)


def test_matrices_decay_and_scales_do_not() -> None:
    groups = adamw(list(Regression().parameters()), OPTIMISATION, CPU).param_groups
    assert [group["weight_decay"] for group in groups] == [OPTIMISATION.weight_decay, 0.0]
    assert [[weight.ndim for weight in group["params"]] for group in groups] == [[2], [1]]


class TwoMatrices(nn.Module):
    """A layer's matrix, a scale, and one that has a row for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.lm_head = nn.Linear(8, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 9, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.layer(rows)).relu()).square().mean()


def test_muon_moves_matrices_of_layers_alike_in_all_directions_and_goes_on_from_its_state() -> None:
    knobs = Optimisation(num_steps=9, optimiser=Optimiser.muon, weight_decay=0.0)
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    module, again = TwoMatrices(), TwoMatrices()
    step, other = make_step(module, knobs), make_step(again, knobs)
    before = copy.deepcopy(module.state_dict())
    step((rows,), 1e-2)
    moves = {name: module.state_dict()[name] - before[name] for name in before}
    directions = {name: torch.linalg.svdvals(moves[name]) for name in ("layer.weight", "lm_head.weight")}
    spread = {name: float(values.max() / values[: len(values) - 1].min()) for name, values in directions.items()}
    assert spread["layer.weight"] < 2 < spread["lm_head.weight"] and moves["norm.weight"].abs().min() > 0
    again.load_state_dict(module.state_dict())
    for mine, its in zip(other.optimisers, step.optimisers, strict=True):
        mine.load_state_dict(copy.deepcopy(its.state_dict()))
    for each in (step, other):
        each((rows,), 1e-2)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eagle3", "frozen_kv", "dspark"])
def test_a_captured_step_trains_as_a_launched_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rate and batch are read anew at every replay: a step that keeps one of them comes to other losses."""
    make_tiny_target(tmp_path / "target", "qwen3")
    texts = texts_of(record_run(tmp_path / "texts", tmp_path / "target"))
    target = FrozenTarget.load(tmp_path / "target", torch.device("cuda"), torch.float32, 48)
    captured = losses(HEADS[name], target, texts, tmp_path / "none.pt", num_steps=12)[1]
    monkeypatch.setattr("spec_lab.train.step.STEPS_BEFORE_CAPTURE", 99)
    launched = losses(HEADS[name], target, texts, tmp_path / "none.pt", num_steps=12)[1]
    assert len(launched) > STEPS_BEFORE_CAPTURE + 1 and captured == pytest.approx(launched, rel=1e-3)


@pytest.mark.gpu
def test_what_asks_the_device_for_a_number_goes_on_being_launched() -> None:
    class Asking(Regression):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * (1.0 + 0.0 * inputs.sum().item())

    module = Asking().to("cuda")
    step = make_step(module, OPTIMISATION)
    before = module.linear.weight.detach().clone()
    for number in range(8):
        step((Batches()(number)[0].to("cuda"),), 0.05)
    assert not step.is_captured and not torch.equal(module.linear.weight, before)
