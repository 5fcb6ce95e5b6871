"""What a stage of a training will take, said before it runs: tokens, bytes on disk, memory and seconds."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.errors import UserError
from spec_lab.menu.chosen import Chosen
from spec_lab.train.texts.settings import TextsConfig
from spec_lab.wiring.caches import cache_row

BYTES_OF_A_CHARACTER_S_TOKEN = 4
"""Of a prompt's line of JSON, for each of its tokens."""
ROOM = 1.1
"""So much of what is planned has to be free: files are written beside those that they replace."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage takes at most; its seconds are a guess from a rate.

    Attributes:
        tokens: that the stage runs or writes.
        memory_bytes: on the device, at the peak.
        seconds: None where no rate is known.
        num_done: of its texts, that a killed command left; tokens and disk are those of all.
        less_disk, less_memory: what to do where there is no room for it.
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
    """How fast a target writes, and how long its texts become: what a probe finds.

    Attributes:
        prompt_tokens: of a mean prompt, its template included.
        answer_tokens: of a mean answer.
    """

    tokens_per_second: float
    prompt_tokens: float
    answer_tokens: float


def plan_texts(chosen: Chosen, config: TextsConfig, rate: Rate | None = None) -> StagePlan:
    """Say what the texts take. Without a rate all are as long as they may become, and seconds are not known."""
    target = read_model_config(chosen.target_folder)
    prompt = config.max_prompt_tokens if rate is None else rate.prompt_tokens
    answer = config.max_new_tokens if rate is None else rate.answer_tokens
    id_bytes = 2 if target.vocab_size <= 2**16 else 4
    tokens = round(config.num_texts * (prompt + answer))
    lines = config.num_texts * prompt * BYTES_OF_A_CHARACTER_S_TOKEN
    # The target writes the prompts too, unless they are given.
    written = config.num_texts * (answer + (0 if config.prompts else prompt))
    item_size = 4 if str(chosen.config.dtype) == "float32" else 2
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
        UserError: which names the stage.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    needed = sum(stage.disk_bytes for stage in stages)
    if needed * ROOM > free:
        largest = max(stages, key=lambda stage: stage.disk_bytes)
        raise UserError(
            f"output_dir={folder}: {_size(needed)} are needed on its disk, and {_size(free)} are free; "
            f"{largest.less_disk} or choose another output_dir"
        )
    for stage in stages:
        if device_bytes is not None and stage.memory_bytes > device_bytes:
            raise UserError(
                f"{stage.name}: {_size(stage.memory_bytes)} are needed in the device's memory, and it has "
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
