"""Estimates the cost of a training's stage before it runs: tokens, bytes on disk, memory and seconds."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from spec_lab.build.caches import cache_row
from spec_lab.build.models import resolve_device, resolve_dtype
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.train.texts.settings import TextsConfig

JSON_BYTES_OF_A_TOKEN = 4
"""Bytes that a token of a prompt takes as text in the file of prompts."""
ROOM = 1.1
"""Free bytes must be this many times the planned ones: while one of the files is replaced, both its versions exist."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The cost of a stage, estimated from probes. Without a probe, tokens and disk are the most that it can take.

    Attributes:
        tokens: the tokens that the stage runs or writes.
        memory_bytes: what the stage needs on the device; for texts, only weights and cache count.
        seconds: None if no rate is known.
        num_done: the texts that a killed command has already written; tokens and disk include them.
        less_disk, less_memory: the remedy if there is no room.
    """

    name: str
    tokens: int
    disk_bytes: int
    memory_bytes: int
    seconds: float | None = None
    num_done: int = 0
    less_disk: str = "lower num_texts"
    less_memory: str = "lower batch_size"


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a target writes, and how long its texts are: a probe's result, or a user's rate with maximum lengths.

    Attributes:
        prompt_tokens: the length of a prompt, including its template; a probe's mean.
        answer_tokens: the length of an answer; a probe's mean.
    """

    tokens_per_second: float
    prompt_tokens: float
    answer_tokens: float


def plan_texts(chosen: Run, config: TextsConfig, rate: Rate | None = None) -> StagePlan:
    """Estimate the cost of the texts. Without a rate all have the maximum length, and seconds are unknown."""
    target = read_model_config(chosen.target.folder)
    prompt = config.max_prompt_tokens if rate is None else rate.prompt_tokens
    answer = config.max_new_tokens if rate is None else rate.answer_tokens
    id_bytes = 2 if target.vocab_size <= 2**16 else 4
    tokens = round(config.num_texts * (prompt + answer))
    lines = config.num_texts * prompt * JSON_BYTES_OF_A_TOKEN
    # The target writes the prompts too, unless they are given.
    written = config.num_texts * (answer + (0 if config.prompts else prompt))
    item_size = resolve_dtype(chosen.dtype, resolve_device(chosen.device)).itemsize
    weights = sum(map(prod, decoder_tensor_shapes(target).values())) * item_size
    rows = (cache_row(plan) for plan in target.layers)
    row = sum(prod(row.shape) for row in rows if row is not None and row.owner is None) * item_size
    cache = config.batch_size * config.longest * row * len({*config.temperatures, *config.prompt_temperatures})
    return StagePlan(
        "texts",
        tokens,
        disk_bytes=round(tokens * id_bytes + lines),
        memory_bytes=weights + cache,
        seconds=None if rate is None else written / rate.tokens_per_second,
    )


def refuse_what_does_not_fit(stages: Sequence[StagePlan], folder: Path, device_bytes: int | None) -> None:
    """Refuse stages that need more than the disk of `folder`, or the device, has.

    Raises:
        UserError: the disk is too small for all stages together, or the device for one of them, which is named.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    needed = sum(stage.disk_bytes for stage in stages)
    if needed * ROOM > free:
        largest = max(stages, key=lambda stage: stage.disk_bytes)
        raise UserError(
            f"output_dir={folder}: {_size(round(needed * ROOM))} are needed on its disk, but only {_size(free)} are "
            f"free; {largest.less_disk} or choose another output_dir"
        )
    for stage in stages:
        if device_bytes is not None and stage.memory_bytes > device_bytes:
            raise UserError(
                f"{stage.name}: {_size(stage.memory_bytes)} are needed in the device's memory, but it has "
                f"{_size(device_bytes)}; {stage.less_memory}"
            )


def format_plan(stages: Sequence[StagePlan]) -> str:
    """Return the stages as a table."""
    header = ("stage", "tokens", "disk", "memory", "seconds")
    rows = [
        (
            *(stage.name, f"{stage.tokens:,}", _size(stage.disk_bytes), _size(stage.memory_bytes)),
            "not known" if stage.seconds is None else f"{stage.seconds:.0f}",
        )
        for stage in stages
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
