"""Estimates the cost of a training from a few real steps, and shows the texts that it will learn from."""

from __future__ import annotations

import copy
import logging
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.build.memory import memory_of
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.head_recipe import HeadRecipe
from spec_lab.train.packed_training import PackedTask
from spec_lab.train.texts.folder import Texts
from spec_lab.train.texts.plan import StagePlan, format_plan, refuse_what_does_not_fit
from spec_lab.train.texts.show import show_texts
from spec_lab.workloads.tokenizer import TargetTokenizer

log = logging.getLogger(__name__)

PROBE_STEPS, PROBE_STEPS_ON_A_CPU = 6, 3
"""The numbers of steps to run, of which the last two are timed. On a GPU the first ones compile. The fourth is captured
as a CUDA graph, if the training captures steps at all (`train.step`)."""
CHECKPOINT_BYTES = 12
"""The most bytes for each parameter in a checkpoint: a weight and two moments in float32."""
MEGA = 1e6


def show(texts: Any, path: Path, number: int) -> str:
    """Return the first `number` texts, with the tokens that count marked."""
    thinking = texts.header.settings.get("thinking")
    return show_texts(texts, TargetTokenizer(path, thinking), number, in_colour=sys.stdout.isatty())


@dataclass(frozen=True, slots=True)
class Probe:
    """The inputs of the probe steps.

    Attributes:
        learnt: texts to learn from, or texts of random tokens if they are still to be written.
        texts: the cost of writing them; None if they exist.
    """

    recipe: HeadRecipe
    target: FrozenTarget
    learnt: Texts
    row_length: int
    texts: StagePlan | None


def planned(probe: Probe, output: Path) -> str:
    """Take a few steps, and return an estimate for the whole training.

    Raises:
        UserError: the disk or the device has no room for it.
    """
    recipe, learnt, target = probe.recipe, probe.learnt, probe.target
    drafter, optimisation = recipe.build(target, learnt, 0), recipe.config.optimisation
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    packed = learnt.packed(probe.row_length, 0)
    share = 1.0 if probe.texts is None else len(learnt.tokens) / probe.texts.tokens
    seconds = _seconds_of_a_step(probe, copy.deepcopy(drafter))
    num_rows, by_clock = round(len(packed) / share), optimisation.max_seconds
    epoch = -(-num_rows // optimisation.batch_size)
    num_steps = optimisation.num_steps if by_clock is None else min(optimisation.num_steps, int(by_clock / seconds))
    training = StagePlan(
        "training",
        num_steps * optimisation.batch_size * probe.row_length,
        # Two checkpoints, the best export, the newest export, and the drafter itself.
        disk_bytes=num_parameters * (2 * CHECKPOINT_BYTES + 3 * 2),
        memory_bytes=_peak(target.device),
        seconds=num_steps * seconds,
        less_disk="choose a smaller drafter",
        less_memory="lower drafter.optimisation.batch_size",
    )
    stages = [training] if probe.texts is None else [probe.texts, training]
    # Stand-ins all have the mean length, so they do not tell how many texts are longer than a row.
    cut = f"; {packed.num_cut} texts cut" if probe.texts is None else ""
    refuse_what_does_not_fit(stages, output, memory_of(target.device))
    return "\n".join(
        [
            f"texts: {_texts_in_words(probe)}",
            f"rows: {num_rows:,} of {probe.row_length} tokens, {packed.fill:.0%} filled{cut}",
            f"drafter: {num_parameters / MEGA:.2f} M parameters, {2 * num_parameters / MEGA:.1f} MB in bf16",
            f"steps: {seconds:.3f} s each, from a probe; {num_steps:,} of "
            f"them, {num_steps / epoch:.1f} times all texts",
            format_plan(stages),
            "Proofs, real decoding and the engine that decodes come on top.",
        ]
    )


def _texts_in_words(probe: Probe) -> str:
    """Describe which texts exist, and which would be written first."""
    learnt, stage = probe.learnt, probe.texts
    if stage is None:
        return (
            f"{len(learnt):,} to learn from, {len(learnt.tokens):,} tokens of which the target wrote "
            f"{learnt.num_written_tokens:,}"
        )
    whole = f"{stage.tokens:,} tokens"
    if stage.num_done:
        return f"{stage.num_done:,} of a command that was killed; the others are written first, {whole} in all"
    return f"none yet; about {whole} are written first, as estimated from a probe"


def _seconds_of_a_step(probe: Probe, drafter: Any) -> float:
    recipe, target = probe.recipe, probe.target
    on_gpu = target.device.type == "cuda"
    num_steps = PROBE_STEPS if on_gpu else PROBE_STEPS_ON_A_CPU
    steps = replace(
        recipe.config.optimisation,
        num_steps=num_steps,
        num_warmup_steps=1,
        log_every=num_steps,
        checkpoint_every=num_steps + 1,
        max_seconds=None,
    )
    watch = Stopwatch(target.device, num_steps)
    if on_gpu:  # the peak of the engine that wrote texts does not count: it is gone
        torch.cuda.reset_peak_memory_stats(target.device)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, taps = Path(folder) / "probe.pt", recipe.taps(target)
        task = PackedTask(target, probe.learnt, taps, probe.row_length, checkpoint, 0, target.device, watch=watch)
        recipe.form.train(drafter, replace(recipe.config, optimisation=steps), task)
    return (watch.times[-1] - watch.times[-3]) / 2


class Stopwatch:
    """Records when each step of a training ends."""

    every = 1

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self.times: list[float] = []
        self._device, self._num_steps = device, num_steps

    def point(self, point: Any) -> None:
        """Do nothing: the loss does not matter."""

    def look(self, step: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times.append(time.perf_counter())
        log.info("probe: step %d of %d", len(self.times), self._num_steps)


def _peak(device: torch.device) -> int:
    """Return the peak memory in bytes: the probe's on a GPU, or the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
