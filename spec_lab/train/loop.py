"""The training loop shared by the target and every drafter: warm-up, linear decay, checkpoints, a loss curve."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from spec_lab.core.errors import Breakdown
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.optimisers import Several
from spec_lab.train.reading import reading
from spec_lab.train.step import Batch, Compile, make_step

if TYPE_CHECKING:
    from spec_lab.train.group import TrainingGroup

log = logging.getLogger(__name__)

STEPS_BETWEEN_READS = 16
LOWER_IT = (
    "lower drafter.optimisation.peak_learning_rate, or target.optimisation.peak_learning_rate if the target is trained"
)


class TrainingDiverged(Breakdown):
    """A loss or a weight is no longer a finite number. The message names the step and the knob to lower."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The mean loss of the steps since the previous point; `step` is the last of them."""

    step: int
    loss: float


class Watch(Protocol):
    """Observes a training while it runs."""

    @property
    def every(self) -> int:
        """The number of steps between calls of `look`, which is also called at the end."""

    def point(self, point: CurvePoint) -> None:
        """Receive a point of the loss curve."""

    def look(self, step: int) -> None:
        """Look at the module after `step` steps."""


def learning_rate(optimisation: OptimisationConfig, step: int, elapsed: float = 0.0) -> float:
    """Return the learning rate of update `step`, counted from 0, `elapsed` seconds after the first.

    With a time limit, the rate falls with the steps or with the seconds, whichever are further advanced.
    """
    done = float(step)
    if (seconds := optimisation.max_seconds) is not None:
        done = max(done, min(elapsed / seconds, 1.0) * optimisation.num_steps)
    rising = (step + 1) / optimisation.num_warmup_steps
    falling = (optimisation.num_steps - done) / (optimisation.num_steps - optimisation.num_warmup_steps)
    return optimisation.peak_learning_rate * min(rising, falling, 1.0)


def train(
    loss_module: nn.Module,
    batch_of: Callable[[int], Batch],
    optimisation: OptimisationConfig,
    checkpoint: Path,
    device: torch.device,
    inputs_of: Callable[..., Batch] | None = None,
    compiled: Compile = torch.compile,
    watch: Watch | None = None,
    group: TrainingGroup | None = None,
    in_16_bits: bool | None = None,
) -> list[CurvePoint]:
    """Minimise `loss_module(*batch_of(step))`, a scalar, over the module's parameters, and return the loss curve.

    `batch_of` must depend only on the step. `checkpoint` holds weights, moments and the step, from which an interrupted
    call resumes; the caller deletes it once the result is saved. `inputs_of(*batch)`, if given, turns a batch into the
    module's inputs, as part of the step. A GPU replays whole steps if it can (`train.step`), and computes the loss by
    `compiled(loss_module)`.

    `watch` looks before a checkpoint is written. So a resumed training looks again at exactly the steps after its
    checkpoint. With several processes in a `group`, the loss is the sum of theirs. The first process watches, and
    writes the checkpoint for all.

    Products are computed in bfloat16 if `in_16_bits`; None uses the device's default.

    Raises:
        TrainingDiverged: a loss is not finite, or a weight at a checkpoint or at the end.
    """
    loss_module.to(device).train()
    add_up = group.add_up if group is not None and group.size > 1 else None
    take_step = make_step(loss_module, optimisation, device, inputs_of, compiled, add_up, in_16_bits)
    resumed = _resume(checkpoint, loss_module, take_step.optimiser, device)
    first_step, curve = resumed.step, resumed.curve
    losses = LossReader(device, *resumed.summed)
    started = time.perf_counter() - resumed.seconds
    done, looked, seconds = first_step, None, optimisation.max_seconds

    def add_point() -> None:
        curve.append(CurvePoint(done, losses.mean()))
        log.info("step %d loss %.4f, %.0f s", done, curve[-1].loss, time.perf_counter() - started)
        if watch is not None:
            watch.point(curve[-1])

    for step in range(first_step, optimisation.num_steps):
        elapsed = time.perf_counter() - started
        if group is not None and group.size > 1 and seconds is not None:
            elapsed = group.agree(elapsed)
        if seconds is not None and elapsed >= seconds and step > first_step:
            log.info("%.0f s are over at step %d", elapsed, step)
            break
        losses.add(step + 1, take_step(batch_of(step), learning_rate(optimisation, step, elapsed)))
        done = step + 1
        if done % optimisation.log_every == 0:
            add_point()
        if watch is not None and done % watch.every == 0:
            looked = done
            watch.look(done)
        if done % optimisation.checkpoint_every == 0:
            _refuse_unless_finite(losses, loss_module, done)
            state = TrainingState(done, curve, time.perf_counter() - started, losses.summed)
            if group is None or group.rank == 0:
                _save(checkpoint, loss_module, take_step.optimiser, state)
    _refuse_unless_finite(losses, loss_module, done)
    if losses.num_summed:  # the curve ends at the last step
        add_point()
    if watch is not None and looked != done:
        watch.look(done)
    return curve


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The progress of a training, besides weights and moments. `summed` is the sum and number of the losses since the
    last point of the curve."""

    step: int
    curve: list[CurvePoint]
    seconds: float
    summed: tuple[float, int]


class LossReader:
    """Sums the losses of a point of the curve, and stops the training if one is not finite.

    Reading a loss makes the host wait for a GPU, so there up to `STEPS_BETWEEN_READS` losses are read at once. On a CPU
    every loss is read immediately.
    """

    def __init__(self, device: torch.device, total: float = 0.0, num_summed: int = 0) -> None:
        self._sum, self.num_summed = torch.tensor(total, device=device), num_summed
        self._unread: list[tuple[int, Tensor]] = []
        self._steps_between_reads = 1 if device.type == "cpu" else STEPS_BETWEEN_READS

    def add(self, step: int, loss: Tensor) -> None:
        """Add the loss of `step`, a detached scalar."""
        self._sum, self.num_summed = self._sum + loss, self.num_summed + 1
        self._unread.append((step, loss))
        if len(self._unread) >= self._steps_between_reads:
            self.refuse_unless_finite()

    @property
    def summed(self) -> tuple[float, int]:
        """The sum and number of the losses since the last mean."""
        return self._sum.item(), self.num_summed

    def mean(self) -> float:
        """Return the mean of the losses since the previous call."""
        self.refuse_unless_finite()
        mean = self._sum.item() / self.num_summed
        self._sum, self.num_summed = torch.zeros_like(self._sum), 0
        return mean

    def refuse_unless_finite(self) -> None:
        """Raise TrainingDiverged if a loss that has not been read yet is not finite."""
        unread, self._unread = self._unread, []
        values = torch.stack([loss for _, loss in unread]).tolist() if unread else []
        for (step, _), value in zip(unread, values, strict=True):
            if not math.isfinite(value):
                raise TrainingDiverged(f"the loss of step {step} is {value}; {LOWER_IT}")


def _refuse_unless_finite(losses: LossReader, module: nn.Module, step: int) -> None:
    """Raise TrainingDiverged if losses or weights are not finite: a bad gradient in the last step is in no loss."""
    losses.refuse_unless_finite()
    spoilt = [name for name, weight in module.named_parameters() if not weight.isfinite().all()]
    if spoilt:
        raise TrainingDiverged(
            f"{len(spoilt)} weights such as {spoilt[0]} are not finite after step {step}; {LOWER_IT}"
        )


def _save(
    checkpoint: Path, module: nn.Module, optimiser: torch.optim.Optimizer | Several, state: TrainingState
) -> None:
    """Write to a temporary file and rename it, so that a killed training keeps the previous checkpoint."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "module": module.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": state.step,
        "curve": [(point.step, point.loss) for point in state.curve],
        "seconds": state.seconds,
        "summed": list(state.summed),
    }
    unfinished = checkpoint.with_suffix(".tmp")
    with unfinished.open("wb") as opened:
        try:
            torch.save(content, opened)
        except RuntimeError as error:  # torch's own error hides the file's, such as a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    unfinished.replace(checkpoint)


def _resume(
    checkpoint: Path, module: nn.Module, optimiser: torch.optim.Optimizer | Several, device: torch.device
) -> TrainingState:
    if not checkpoint.exists():
        return TrainingState(0, [], 0.0, (0.0, 0))
    with reading(checkpoint):
        with checkpoint.open("rb") as opened:
            content = torch.load(opened, map_location=device, weights_only=True)
        module.load_state_dict(content["module"])
        optimiser.load_state_dict(content["optimiser"])
        total, number = content.get("summed", (0.0, 0))
        curve = [CurvePoint(step, loss) for step, loss in content["curve"]]
        state = TrainingState(int(content["step"]), curve, float(content["seconds"]), (float(total), int(number)))
    log.info("resumed from %s at step %d", checkpoint, state.step)
    return state
