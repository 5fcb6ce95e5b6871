"""What a training will take, from a few steps that are really taken, and the texts that it will learn from."""

from __future__ import annotations

import copy
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.errors import UserError
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.head_recipe import HeadRecipe
from spec_lab.train.packed_training import PackedTask
from spec_lab.train.texts.show import show_texts
from spec_lab.workloads.tokenizer import TargetTokenizer

PROBE_STEPS = 6
"""The first ones compile, and a GPU records the fourth; the last two are timed."""
BYTES_BESIDE_A_WEIGHT = 12
"""A weight and two moments in float32, as a checkpoint has them."""
MEGA, GIGA = 1e6, 1e9


def show(texts: Any, path: Path, number: int) -> str:
    """Return so many texts with the tokens that count marked."""
    thinking = texts.header.settings.get("thinking")
    return show_texts(texts, TargetTokenizer(path, thinking), number, in_colour=sys.stdout.isatty())


def planned(recipe: HeadRecipe, target: FrozenTarget, learnt: Any, held_out: Any, row_length: int, output: Path) -> str:
    """Take a few steps, and return what all will take.

    Raises:
        UserError: the disk has no room for it.
    """
    drafter, optimisation = recipe.build(target, learnt, 0), recipe.config.optimisation
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    packed = learnt.packed(row_length, 0)
    seconds = _seconds_of_a_step(recipe, target, learnt, row_length, copy.deepcopy(drafter))
    epoch = -(-len(packed) // optimisation.batch_size)
    by_clock = optimisation.max_seconds
    num_steps = optimisation.num_steps if by_clock is None else min(optimisation.num_steps, int(by_clock / seconds))
    # A checkpoint with the one before it, the best export, the newest and the drafter itself.
    disk = num_parameters * (2 * BYTES_BESIDE_A_WEIGHT + 3 * 2)
    _refuse_a_full_disk(disk, output)
    return "\n".join(
        [
            f"texts: {len(learnt):,} to learn from, {len(learnt.tokens):,} tokens of which the target wrote "
            f"{learnt.num_written_tokens:,}; {len(held_out):,} held out",
            f"rows: {len(packed):,} of {row_length} tokens, {packed.fill:.0%} filled; {packed.num_cut} texts are cut",
            f"drafter: {num_parameters / MEGA:.2f} M parameters, {2 * num_parameters / MEGA:.1f} MB in bf16",
            f"steps: {seconds:.3f} s each, by a probe; {num_steps:,} of them, or {num_steps * seconds:.0f} s, which is "
            f"{num_steps / epoch:.1f} times all texts; proofs and real decoding come on top",
            f"disk: {disk / GIGA:.2f} GB",
            f"memory: {_peak(target.device)}",
        ]
    )


def _seconds_of_a_step(recipe: HeadRecipe, target: FrozenTarget, learnt: Any, row_length: int, drafter: Any) -> float:
    steps = replace(
        recipe.config.optimisation,
        num_steps=PROBE_STEPS,
        num_warmup_steps=1,
        log_every=PROBE_STEPS,
        checkpoint_every=PROBE_STEPS + 1,
        max_seconds=None,
    )
    watch = Stopwatch(target.device)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "probe.pt"
        taps = recipe.taps(target)
        task = PackedTask(target, learnt, taps, row_length, checkpoint, 0, target.device, watch=watch)
        recipe.form.train(drafter, replace(recipe.config, optimisation=steps), task)
    return (watch.times[-1] - watch.times[-3]) / 2


class Stopwatch:
    """Keeps the protocol `Watch`: notes when each step has ended."""

    every = 1

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self._device = device

    def point(self, point: Any) -> None:
        """Do nothing: the loss does not matter."""

    def look(self, step: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times.append(time.perf_counter())


def _refuse_a_full_disk(num_bytes: int, output: Path) -> None:
    there = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise UserError(
            f"output_dir={output} has room for {free / GIGA:.2f} GB, and the training takes {num_bytes / GIGA:.2f}; "
            "choose another output_dir, or a smaller drafter"
        )


def _peak(device: torch.device) -> str:
    """Say how much memory the probe took at most."""
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        return f"{peak / GIGA:.1f} GB of the GPU's {total / GIGA:.1f}, without the engine that decodes"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGA:.1f} GB of this process"
