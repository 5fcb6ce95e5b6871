"""The training loop shared by the target and every drafter: AdamW, warm-up, linear decay, checkpoints, a loss curve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from spec_lab.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Optimisation:
    """How a module is trained.

    The learning rate rises linearly over `num_warmup_steps` and falls linearly to zero at `num_steps`: for a fixed
    number of tokens, decay to zero beats decay to a tenth (Bergsma et al., 2025, "Straight to Zero").
    """

    num_steps: int
    batch_size: int
    peak_learning_rate: float
    num_warmup_steps: int
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    checkpoint_every: int = 1000
    log_every: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.num_warmup_steps < self.num_steps:
            raise UserError(
                f"num_warmup_steps={self.num_warmup_steps} must lie between 0 and num_steps={self.num_steps}; lower it"
            )
        if self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size} must be at least 1")

    def learning_rate(self, step: int) -> float:
        """The rate of update `step`, counted from 0."""
        rising = (step + 1) / self.num_warmup_steps
        falling = (self.num_steps - step) / (self.num_steps - self.num_warmup_steps)
        return self.peak_learning_rate * min(rising, falling, 1.0)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Mean loss of the steps since the point before, `step` the last of them (since then, where a run was resumed)."""

    step: int
    loss: float


def train(
    loss_module: nn.Module,
    batch_of: Callable[[int], tuple[Tensor, ...]],
    optimisation: Optimisation,
    checkpoint: Path,
    device: torch.device,
) -> list[CurvePoint]:
    """Minimises `loss_module(*batch_of(step))`, a scalar, over the module's parameters, and returns the loss curve.

    `batch_of` must depend on the step alone: nothing but weights, moments and the step is kept in `checkpoint`, from
    which an interrupted call goes on. The caller deletes the checkpoint once the result is saved.
    """
    loss_module.to(device).train()
    optimiser = _adamw(loss_module, optimisation, device)
    first_step, curve = _resume(checkpoint, loss_module, optimiser, device)
    compute_loss = torch.compile(loss_module) if device.type == "cuda" else loss_module
    running_loss, num_summed = torch.zeros((), device=device), 0
    started = time.perf_counter()
    for step in range(first_step, optimisation.num_steps):
        batch = batch_of(step)
        for group in optimiser.param_groups:
            group["lr"] = optimisation.learning_rate(step)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = compute_loss(*batch)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(loss_module.parameters(), optimisation.max_grad_norm)
        optimiser.step()
        running_loss, num_summed = running_loss + loss.detach(), num_summed + 1
        done = step + 1
        if done % optimisation.log_every == 0:
            curve.append(CurvePoint(done, running_loss.item() / num_summed))
            running_loss, num_summed = torch.zeros_like(running_loss), 0
            log.info("step %d loss %.4f, %.0f s", done, curve[-1].loss, time.perf_counter() - started)
        if done % optimisation.checkpoint_every == 0:
            _save(checkpoint, loss_module, optimiser, done, curve)
    return curve


def _adamw(module: nn.Module, optimisation: Optimisation, device: torch.device) -> torch.optim.AdamW:
    """Weight decay on matrices only: a norm's scale has no reason to shrink."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optimisation.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")


def _save(
    checkpoint: Path, module: nn.Module, optimiser: torch.optim.Optimizer, step: int, curve: list[CurvePoint]
) -> None:
    """Written beside and renamed, so that a kill while writing leaves the previous checkpoint."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "module": module.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
        "curve": [(point.step, point.loss) for point in curve],
    }
    unfinished = checkpoint.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(checkpoint)


def _resume(
    checkpoint: Path, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
) -> tuple[int, list[CurvePoint]]:
    if not checkpoint.exists():
        return 0, []
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    module.load_state_dict(state["module"])
    optimiser.load_state_dict(state["optimiser"])
    log.info("resumed from %s at step %d", checkpoint, state["step"])
    return state["step"], [CurvePoint(step, loss) for step, loss in state["curve"]]
