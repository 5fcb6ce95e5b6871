"""A training step: what it reads of a batch, and that a recorded one trains as a launched one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_lab.train.config import OptimisationConfig
from spec_lab.train.data import next_token_labels
from spec_lab.train.decoder import DecoderLoss
from spec_lab.train.loop import train
from spec_lab.train.step import STEPS_BEFORE_CAPTURE, CapturedStep, LaunchedStep, adamw, make_step
from spec_lab.train.target import NextTokenLoss
from tests.test_train_decoder import FAMILIES
from tests.test_train_loop import CPU, OPTIMISATION, Batches, Regression

NUM_STEPS = 20


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
    groups = adamw(Regression(), OPTIMISATION, CPU).param_groups
    assert [group["weight_decay"] for group in groups] == [OPTIMISATION.weight_decay, 0.0]
    assert [[weight.ndim for weight in group["params"]] for group in groups] == [[2], [1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_decoder_is_that_of_its_logits(family: str) -> None:
    loss = family_loss(family, CPU).eval()
    rows = torch.randint(FAMILIES[family][1]["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    labels = next_token_labels(rows, pad_id=0)
    assert torch.equal(loss(rows, labels), NextTokenLoss(loss.model)(rows, labels))


def family_loss(family: str, device: torch.device) -> DecoderLoss:
    kind, keys, _ = FAMILIES[family]
    torch.manual_seed(0)
    return DecoderLoss(kind(keys)).to(device).train()


def losses_of(step: Any, vocab_size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for number in range(NUM_STEPS):
        rows = torch.randint(vocab_size, (4, 96), generator=generator).to(device)
        losses.append(step((rows, rows[:, 1:]), 1e-2 * min(1.0, (number + 1) / 10)))
    return torch.stack(losses)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_trains_as_a_launched_one(family: str) -> None:
    """Twenty steps, of which the first are launched either way; and the rate is read anew at every replay."""
    device = torch.device("cuda")
    optimisation = OptimisationConfig(num_steps=NUM_STEPS, num_warmup_steps=2)
    module = family_loss(family, device)
    optimiser = adamw(module, optimisation, device)
    launched = LaunchedStep(list(module.parameters()), module, lambda *batch: batch, optimiser, 1.0)
    vocab_size = FAMILIES[family][1]["vocab_size"]
    expected = losses_of(launched, vocab_size, device)
    recorded = make_step(family_loss(family, device), optimisation, device, compiled=lambda loss: loss)
    assert isinstance(recorded, CapturedStep)
    losses = losses_of(recorded, vocab_size, device)
    assert recorded.is_recorded and NUM_STEPS > STEPS_BEFORE_CAPTURE + 1
    torch.testing.assert_close(losses, expected, atol=5e-2, rtol=0.0)
    assert expected[0] - expected[-1] > 0.1


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
