"""The training loop: an interrupted run goes on, and ends where an uninterrupted one ends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import Tensor, nn

from spec_lab.train.loop import STEPS_BETWEEN_READS, CurvePoint, LossReader, TrainingDiverged, learning_rate, train
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.packed_training import MOST_LOGITS, chunks

OPTIMISATION = OptimisationConfig(
    num_steps=12, batch_size=4, peak_learning_rate=0.05, num_warmup_steps=3, checkpoint_every=5, log_every=4
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


def run(batches: Batches, checkpoint: Path) -> tuple[Regression, list[CurvePoint]]:
    module = Regression()
    return module, train(module, batches, OPTIMISATION, checkpoint, CPU)


def test_an_interrupted_run_continues_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, whole_curve = run(Batches(), tmp_path / "whole.pt")
    with pytest.raises(Interrupted):
        run(Batches(interrupt_at=8), tmp_path / "part.pt")
    batches = Batches()
    resumed, resumed_curve = run(batches, tmp_path / "part.pt")
    assert batches.steps == list(range(5, 12))
    assert torch.equal(whole.linear.weight, resumed.linear.weight)
    assert [point.step for point in resumed_curve] == [point.step for point in whole_curve] == [4, 8, 12]
    assert resumed_curve[-1] == whole_curve[-1]


def test_the_curve_ends_at_the_last_step_also_between_two_points(tmp_path: Path) -> None:
    optimisation = replace(OPTIMISATION, num_steps=10, max_seconds=1e6)
    curve = train(Regression(), Batches(), optimisation, tmp_path / "state.pt", CPU)
    assert [point.step for point in curve] == [4, 8, 10]


def test_a_kill_while_writing_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted):
        run(Batches(interrupt_at=6), tmp_path / "state.pt")

    def killed(state: object, file: BinaryIO) -> None:
        file.write(b"half a checkpoint")
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(torch, "save", killed)
        run(Batches(), tmp_path / "state.pt")
    batches = Batches()
    run(batches, tmp_path / "state.pt")
    assert batches.steps[0] == 5


def test_a_full_disk_under_a_checkpoint_says_so(tmp_path: Path) -> None:
    """Torch's own error, which hides it, is of a position in the file."""
    (tmp_path / "state.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        run(Batches(), tmp_path / "state.pt")


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
        train(module, batches, OPTIMISATION, tmp_path / "state.pt", CPU)
    assert len(batches.steps) == step
    assert (tmp_path / "state.pt").exists() == (step > 5)
    if step > 5:
        saved = torch.load(tmp_path / "state.pt", weights_only=True)["module"]
        assert all(weight.isfinite().all() for weight in saved.values())


@pytest.mark.parametrize(("step", "found_at"), [(5, 5), (12, 12), (7, 8)])
def test_weights_that_are_no_numbers_are_never_saved(step: int, found_at: int, tmp_path: Path) -> None:
    """A gradient spoils the weights behind a finite loss: the next loss tells, or the check before they are saved."""
    module = Spoilt(step, gradient=math.inf)
    with pytest.raises(TrainingDiverged, match=rf"step {found_at}\b"):
        train(module, Batches(), OPTIMISATION, tmp_path / "state.pt", CPU)
    assert (tmp_path / "state.pt").exists() == (step > 5)


def test_the_losses_of_a_gpu_are_read_a_few_at_once_and_none_is_missed() -> None:
    # The meta device stands for any that is not a CPU.
    for spoilt in (1, STEPS_BETWEEN_READS, STEPS_BETWEEN_READS + 1):
        losses = LossReader(torch.device("meta"))
        with pytest.raises(TrainingDiverged, match=f"step {spoilt} "):
            for step in range(1, STEPS_BETWEEN_READS + 2):
                losses.add(step, torch.tensor(math.nan if step == spoilt else 1.0))
            losses.refuse_unless_finite()
