"""The training loop: an interrupted run goes on, and ends where an uninterrupted one ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spec_lab.train.config import OptimisationConfig
from spec_lab.train.loop import CurvePoint, learning_rate, train

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


def test_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(OPTIMISATION, step) for step in range(12)]
    assert rates[:3] == pytest.approx([0.05 / 3, 0.1 / 3, 0.05])
    assert rates[3:] == pytest.approx([0.05 * (12 - step) / 9 for step in range(3, 12)])
