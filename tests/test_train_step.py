"""A training step: what it reads of a batch, and that a recorded one trains as a launched one does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spec_lab.train.loop import train
from spec_lab.train.module_config import OptimisationConfig, Optimiser
from spec_lab.train.optimisers import adamw
from spec_lab.train.step import CapturedStep, make_step
from tests.test_train_loop import CPU, OPTIMISATION, Batches, Regression

NUM_STEPS = 20
FALL = 1.0
"""How far the losses of these steps fall at least, so that steps that do not train are told from steps that do."""


def test_what_is_made_of_a_batch_is_what_the_module_sees(tmp_path: Path) -> None:
    """The same training, once from batches and once from what is made of their halves."""

    def doubled(halves: Tensor) -> tuple[Tensor]:
        return (2 * halves,)

    whole, halves = Regression(), Regression()
    curve = train(whole, Batches(), OPTIMISATION, tmp_path / "whole.pt", CPU)
    half_batches = Batches()
    same = train(
        halves, lambda step: (half_batches(step)[0] / 2,), OPTIMISATION, tmp_path / "halves.pt", CPU, inputs_of=doubled
    )
    assert same == curve and torch.equal(whole.linear.weight, halves.linear.weight)


@pytest.mark.parametrize("longest", [1e-3, 1e9])
def test_a_step_clips_its_gradients_and_leaves_those_of_the_step_before(longest: float) -> None:
    module = Regression()
    step = make_step(module, OptimisationConfig(num_steps=4, num_warmup_steps=1, max_grad_norm=longest), CPU)
    norms = []
    for _ in range(2):
        step(Batches()(0), learning_rate=0.0)
        gradients = [weight.grad.norm() for weight in module.parameters() if weight.grad is not None]
        norms.append(torch.stack(gradients).norm().item())
    assert norms[0] == norms[1] <= 1.001 * longest


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
    knobs = OptimisationConfig(num_steps=9, num_warmup_steps=1, optimiser=Optimiser.muon, weight_decay=0.0)
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    module, again = TwoMatrices(), TwoMatrices()
    step, other = make_step(module, knobs, CPU), make_step(again, knobs, CPU)
    before = copy.deepcopy(module.state_dict())
    step((rows,), 1e-2)
    moves = {name: module.state_dict()[name] - before[name] for name in before}
    directions = {name: torch.linalg.svdvals(moves[name]) for name in ("layer.weight", "lm_head.weight")}
    spread = {name: float(values.max() / values[: len(values) - 1].min()) for name, values in directions.items()}
    assert spread["layer.weight"] < 2 < spread["lm_head.weight"] and moves["norm.weight"].abs().min() > 0
    again.load_state_dict(module.state_dict())
    other.optimiser.load_state_dict(copy.deepcopy(step.optimiser.state_dict()))
    for each in (step, other):
        each((rows,), 1e-2)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())


@pytest.mark.gpu
def test_what_asks_the_device_for_a_number_goes_on_being_launched() -> None:
    class Asking(Regression):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * (1.0 + 0.0 * inputs.sum().item())

    device, module = torch.device("cuda"), Asking()
    step = make_step(module.to(device), OPTIMISATION, device, compiled=lambda module: module)
    assert isinstance(step, CapturedStep)
    before = module.linear.weight.detach().clone()
    for number in range(8):
        step((Batches()(number)[0].to(device),), 0.05)
    assert not step.is_recorded and not torch.equal(module.linear.weight, before)
