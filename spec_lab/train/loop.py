"""The training loop: warm-up, linear decay, checkpoints, a loss curve, and looks at the head while it is trained."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from spec_lab.core.errors import Breakdown, UserError
from spec_lab.train.config import Optimisation, TrainConfig
from spec_lab.train.data import Texts
from spec_lab.train.group import Processes
from spec_lab.train.head import HeadRecipe
from spec_lab.train.packed import PackedRows, generator_of
from spec_lab.train.step import Batch, Step
from spec_lab.train.target import FrozenTarget

log = logging.getLogger(__name__)

STEPS_BETWEEN_READS = 16
"""On a GPU so many losses are read at once, since reading one makes the host wait."""


class TrainingDiverged(Breakdown):
    """A loss or a weight is no longer a finite number. The message names the step and the knob to lower."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What else happens during a training.

    Attributes:
        every: steps between two calls of `look`, which is also called at the end.
        point: receives a step and the mean loss of the steps since the previous point.
        look: looks at the head after so many steps.
    """

    every: int
    point: Callable[[int, float], None]
    look: Callable[[int], None]


def learning_rate(knobs: Optimisation, step: int, elapsed: float = 0.0) -> float:
    """Return the learning rate of update `step`, counted from 0, `elapsed` seconds after the first."""
    done = float(step)
    if knobs.max_seconds is not None:
        done = max(done, min(elapsed / knobs.max_seconds, 1.0) * knobs.num_steps)
    rising = (step + 1) / max(knobs.num_warmup_steps, 1)
    falling = (knobs.num_steps - done) / max(knobs.num_steps - knobs.num_warmup_steps, 1)
    return knobs.peak_learning_rate * min(rising, falling, 1.0)


@dataclass(slots=True)
class Training:
    """A head in training: what makes a step, and how far it is.

    Attributes:
        step: makes an update of a batch at a learning rate.
        batch_of: returns the batch of a step, which depends on its number alone.
        curve: steps with the mean loss of the steps since the one before.
        summed: losses since the last point of the curve: their sum, and their number.
        seconds: that passed before this process.
    """

    loss: nn.Module
    step: Step
    batch_of: Callable[[int], Batch]
    knobs: Optimisation
    device: torch.device
    group: Processes
    done: int = 0
    curve: list[tuple[int, float]] | None = None
    summed: tuple[float, int] = (0.0, 0)
    seconds: float = 0.0

    @classmethod
    def of(
        cls, config: TrainConfig, module: nn.Module, target: FrozenTarget, texts: Texts, group: Processes
    ) -> Training:
        """Make the training of a head on texts. `module` moves to the target's device."""
        kind: HeadRecipe = config.drafter
        knobs, seed = config.optimisation, config.seed
        rows = texts.packed(config.row_length, seed).to(target.device)
        loss = kind.loss_module(module, target, group).to(target.device).train()
        share = 100 * float(rows.is_supervised.float().mean())
        log.info("%d rows of %d tokens, %.0f%% of them supervised", len(rows), config.row_length, share)

        def batch_of(step: int) -> Batch:
            batch = rows.batch(step, knobs.batch_size, seed)
            drawn = kind.drawn(batch, generator_of(step, seed))
            own = slice(group.rank, None, group.size)
            return *batch.rows(own).tensors(), *(each[own] for each in drawn)

        def inputs_of(*batch: Tensor) -> Batch:
            return kind.inputs(module, target, PackedRows(*batch[:4]), *batch[4:])

        loss_of = kind.compiled(loss) if target.device.type == "cuda" else loss
        step = Step(loss, inputs_of, loss_of, knobs, group=group, in_16_bits=target.in_16_bits)
        return cls(loss, step, batch_of, knobs, device=target.device, group=group, curve=[])

    def run(self, checkpoint: Path, settings: str, watch: Watch | None) -> list[tuple[int, float]]:
        """Train, and return the loss curve. `checkpoint` holds weights, moments and the step, from which an interrupted
        training with the same `settings` continues.

        `watch` looks before a checkpoint is written. So a resumed training looks again at exactly the steps after its
        checkpoint.

        Raises:
            TrainingDiverged: a loss is not finite, or a weight at a checkpoint or at the end.
            UserError: the checkpoint is of other settings.
        """
        self._resume(checkpoint, settings)
        knobs, began, looked = self.knobs, time.perf_counter() - self.seconds, -1
        first, losses = self.done, []
        curve = self.curve or []
        for number in range(first, knobs.num_steps):
            elapsed = time.perf_counter() - began
            if knobs.max_seconds is not None:
                elapsed = self.group.agree(elapsed, self.device)
                if elapsed >= knobs.max_seconds and number > first:
                    told = "optimisation.max_seconds: %.0f s are over at step %d of %d"
                    log.warning(told, elapsed, number, knobs.num_steps)
                    break
            losses.append(self.step(self.batch_of(number), learning_rate(knobs, number, elapsed)))
            self.done = number + 1
            at_point, saves = self.done % knobs.log_every == 0, self.done % knobs.checkpoint_every == 0
            if at_point or saves or len(losses) >= (STEPS_BETWEEN_READS if self.device.type == "cuda" else 1):
                self._read(losses)
            if at_point:
                self._add_point(curve, began, watch)
            if watch is not None and self.done % watch.every == 0:
                looked = self.done
                watch.look(self.done)
            if saves:
                self.seconds = time.perf_counter() - began
                self._save(checkpoint, settings, curve)
        self._read(losses)
        self._require_finite_weights()
        if self.summed[1]:  # the curve ends at the last step
            self._add_point(curve, began, watch)
        if watch is not None and looked != self.done:
            watch.look(self.done)
        self.seconds = time.perf_counter() - began
        return curve

    def _read(self, losses: list[Tensor]) -> None:
        """Add unread losses to the sum, and forget them."""
        values = torch.stack(losses).tolist() if losses else []
        for step, value in enumerate(values, start=self.done - len(values) + 1):
            if not math.isfinite(value):
                raise TrainingDiverged(f"the loss of step {step} is {value}; lower optimisation.peak_learning_rate")
        self.summed = self.summed[0] + sum(values), self.summed[1] + len(values)
        losses.clear()

    def _add_point(self, curve: list[tuple[int, float]], began: float, watch: Watch | None) -> None:
        total, number = self.summed
        self.summed = 0.0, 0
        curve.append((self.done, total / number))
        log.info("step %d loss %.4f, %.0f s", self.done, total / number, time.perf_counter() - began)
        if watch is not None:
            watch.point(self.done, total / number)

    def _require_finite_weights(self) -> None:
        """A bad gradient in the last step is in no loss."""
        for name, weight in self.loss.named_parameters():
            if not weight.isfinite().all():
                raise TrainingDiverged(
                    f"{name} is not finite after step {self.done}; lower optimisation.peak_learning_rate"
                )

    def _save(self, checkpoint: Path, settings: str, curve: list[tuple[int, float]]) -> None:
        """Write to a temporary file and rename it, so that a killed training keeps the previous checkpoint."""
        self._require_finite_weights()
        if self.group.rank:
            return
        states = [optimiser.state_dict() for optimiser in self.step.optimisers]
        content = {"loss": self.loss.state_dict(), "optimisers": states, "settings": settings, "done": self.done}
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = checkpoint.with_suffix(".tmp")
        torch.save(content | {"curve": curve, "summed": self.summed, "seconds": self.seconds}, unfinished)
        unfinished.replace(checkpoint)

    def _resume(self, checkpoint: Path, settings: str) -> None:
        if not checkpoint.exists():
            return
        content = torch.load(checkpoint, map_location=self.device, weights_only=True)
        if content["settings"] != settings:
            raise UserError(
                f"{checkpoint} was begun with other settings or data; delete it, or choose another hydra.run.dir"
            )
        self.loss.load_state_dict(content["loss"])
        for optimiser, state in zip(self.step.optimisers, content["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.done, self.curve, self.seconds = content["done"], content["curve"], content["seconds"]
        self.summed = content["summed"]
        log.info("resumed from %s at step %d", checkpoint, self.done)
