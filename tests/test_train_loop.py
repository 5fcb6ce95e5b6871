"""The training loop: an interrupted run goes on, and ends where an uninterrupted one ends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spec_lab.core.errors import UserError
from spec_lab.train.config import Optimisation
from spec_lab.train.group import ALONE
from spec_lab.train.loop import Training, TrainingDiverged, learning_rate
from spec_lab.train.losses import MOST_LOGITS, chunks
from spec_lab.train.step import Step

OPTIMISATION = Optimisation(
    num_steps=12,
    batch_size=4,
    peak_learning_rate=0.05,
    num_warmup_steps=3,
    checkpoint_every=5,
    log_every=4,
    max_seconds=None,
)
CPU = torch.device("cpu")


class Interrupted(Exception):
    pass


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.linear(inputs) - inputs.sum(-1, keepdim=True)).square().mean()


class Batches:
    """Batches that remember which steps asked for them, and stop the run at one of them."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.interrupt_at = interrupt_at

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        if step == self.interrupt_at:
            raise Interrupted
        self.steps.append(step)
        return (torch.randn(4, 3, generator=torch.Generator().manual_seed(step)),)


def as_they_are(*batch: Tensor) -> tuple[Tensor, ...]:
    return batch


def train(
    module: nn.Module, batches: Batches, checkpoint: Path, knobs: Optimisation = OPTIMISATION, settings: str = ""
) -> list[tuple[int, float]]:
    step = Step(module, as_they_are, module, knobs, ALONE, in_16_bits=False)
    return Training(module, step, batches, knobs, CPU, ALONE, curve=[]).run(checkpoint, settings, None)


def run(batches: Batches, checkpoint: Path) -> tuple[Regression, list[tuple[int, float]]]:
    module = Regression()
    return module, train(module, batches, checkpoint)


def test_an_interrupted_run_continues_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, whole_curve = run(Batches(), tmp_path / "whole.pt")
    with pytest.raises(Interrupted):
        run(Batches(interrupt_at=8), tmp_path / "part.pt")
    batches = Batches()
    resumed, resumed_curve = run(batches, tmp_path / "part.pt")
    assert batches.steps == list(range(5, 12))
    assert torch.equal(whole.linear.weight, resumed.linear.weight)
    assert resumed_curve == whole_curve and [step for step, _ in whole_curve] == [4, 8, 12]
    with pytest.raises(UserError, match="begun with other settings"):
        train(Regression(), Batches(), tmp_path / "part.pt", settings="others")


@pytest.mark.parametrize("max_seconds", [None, 1e6])
def test_the_curve_ends_at_the_last_step(max_seconds: float | None, tmp_path: Path) -> None:
    """A card counts the steps by it, also if a training has a time limit and ends before it."""
    optimisation = replace(OPTIMISATION, num_steps=10, max_seconds=max_seconds)
    curve = train(Regression(), Batches(), tmp_path / "whole.pt", optimisation)
    assert [step for step, _ in curve] == [4, 8, 10]
    again = train(Regression(), Batches(), tmp_path / "whole.pt", optimisation)  # from the last checkpoint
    assert again == curve


def test_a_kill_while_writing_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted):
        run(Batches(interrupt_at=6), tmp_path / "state.pt")

    def killed(state: object, file: Path) -> None:
        file.write_bytes(b"half a checkpoint")
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(torch, "save", killed)
        run(Batches(), tmp_path / "state.pt")
    batches = Batches()
    run(batches, tmp_path / "state.pt")
    assert batches.steps[0] == 5


@pytest.mark.parametrize("num_rows", [0, 1, 7, 16384, 13 * 1021])
def test_parts_hold_every_row_once_and_have_one_size_where_that_takes_few_more(num_rows: int) -> None:
    vocab_size = 49152
    parts = chunks(num_rows, vocab_size)
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    sizes = {part.stop - part.start for part in parts}
    assert max(sizes) * vocab_size <= MOST_LOGITS + vocab_size
    assert len(sizes) == 1 or num_rows == 13 * 1021


def test_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(OPTIMISATION, step) for step in range(12)]
    assert rates[:3] == pytest.approx([0.05 / 3, 0.1 / 3, 0.05])
    assert rates[3:] == pytest.approx([0.05 * (12 - step) / 9 for step in range(3, 12)])


class Spoilt(Regression):
    """A regression whose loss or gradient stops being a number at one step."""

    def __init__(self, step: int, loss: float = 1.0, gradient: float = 1.0) -> None:
        super().__init__()
        self.step, self.loss, self.gradient, self.calls = step, loss, gradient, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        loss = super().forward(inputs)
        if self.calls < self.step:
            return loss
        if self.gradient != 1.0:
            self.linear.weight.register_hook(lambda gradient: gradient * self.gradient)
        return loss * self.loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("step", [1, 5, 7, 12])
def test_a_loss_that_is_no_number_ends_the_training_at_once(value: float, step: int, tmp_path: Path) -> None:
    module, batches = Spoilt(step, loss=value), Batches()
    with pytest.raises(TrainingDiverged, match=rf"the loss of step {step} is {value}; lower .*peak_learning_rate"):
        train(module, batches, tmp_path / "state.pt")
    assert len(batches.steps) == step
    assert (tmp_path / "state.pt").exists() == (step > 5)
    if step > 5:
        saved = torch.load(tmp_path / "state.pt", weights_only=True)["loss"]
        assert all(weight.isfinite().all() for weight in saved.values())


@pytest.mark.parametrize(("step", "found_at"), [(5, 5), (12, 12), (7, 8)])
def test_weights_that_are_no_numbers_are_never_saved(step: int, found_at: int, tmp_path: Path) -> None:
    """A gradient spoils the weights behind a finite loss: the next loss tells, or the check before they are saved."""
    module = Spoilt(step, gradient=math.inf)
    with pytest.raises(TrainingDiverged, match=rf"step {found_at}\b"):
        train(module, Batches(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").exists() == (step > 5)
