"""This module says what cannot be trained, found before anything is made or loaded, and without torch.

Each check looks at a whole configuration and returns None, or one line that names the knob and the remedy. What a
single knob takes stands in its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spec_lab.assembly.drafters.trained import ZOO
from spec_lab.bounds import out_of_bounds
from spec_lab.errors import UserError
from spec_lab.train.config import (
    DraftModelTrainingConfig,
    Eagle3TrainingConfig,
    FrozenKvTrainingConfig,
    LayerConfig,
    MtpTrainingConfig,
    OptimisationConfig,
    TrainConfig,
)

SHIPPED_TARGET = ZOO / "pocket"


def refuse(config: TrainConfig) -> None:
    """Raise UserError with the first of the `refusals`, if there is one."""
    found = refusals(config)
    if found:
        raise UserError(found[0])


def refusals(config: TrainConfig) -> list[str]:
    """Everything that speaks against the training, a line each; empty when it may start."""
    return out_of_bounds(config) or [message for check in CHECKS if (message := check(config)) is not None]


def nothing_to_train(config: TrainConfig) -> str | None:
    if config.trained_target is None and config.trained_drafter is None:
        return "target=shipped drafter=none leaves nothing to train; choose target=pocket or a drafter"
    return None


def device(config: TrainConfig) -> str | None:
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", config.device):
        return None
    return f"device={config.device} is unknown; use auto, cpu, cuda or cuda:1"


def schedule(config: TrainConfig) -> str | None:
    for prefix, optimisation in _optimisations(config):
        for knob in ("num_warmup_steps", "log_every"):
            value, most = getattr(optimisation, knob), optimisation.num_steps - (knob == "num_warmup_steps")
            if value > most:
                return (
                    f"{prefix}.{knob}={value} does not fit {prefix}.num_steps={optimisation.num_steps}; "
                    f"use {most} or fewer"
                )
    return None


def heads(config: TrainConfig) -> str | None:
    """Every key-value head serves as many query heads, and rotary positions turn pairs of a head's entries."""
    parts: tuple[tuple[str, object], ...] = (("target", config.target), ("drafter", config.drafter))
    for prefix, part in parts:
        if not isinstance(part, LayerConfig):
            continue
        if part.num_heads % part.num_kv_heads:
            return (
                f"{prefix}.num_heads={part.num_heads} must be a multiple of {prefix}.num_kv_heads={part.num_kv_heads}"
            )
        if part.head_dim % 2:
            return f"{prefix}.head_dim={part.head_dim} must be even; use {part.head_dim + 1}"
    return None


def unrolled_steps(config: TrainConfig) -> str | None:
    drafter = config.drafter
    if isinstance(drafter, MtpTrainingConfig) and drafter.num_modules not in (1, drafter.num_unrolled_steps):
        return (
            f"drafter.num_unrolled_steps={drafter.num_unrolled_steps} must be "
            f"drafter.num_modules={drafter.num_modules}: a step a module; or use one module for all steps"
        )
    return None


def measured_drafts(config: TrainConfig) -> str | None:
    drafter, wanted = config.drafter, config.evaluation.num_draft_tokens
    if isinstance(drafter, MtpTrainingConfig) and 1 < drafter.num_modules < wanted:
        return (
            f"evaluation.num_draft_tokens={wanted} is more than drafter.num_modules={drafter.num_modules} can draft; "
            f"use evaluation.num_draft_tokens={drafter.num_modules}"
        )
    return None


def prompts(config: TrainConfig) -> str | None:
    texts = config.generations
    if config.trained_drafter is not None and texts.num_checkable_prompts == texts.num_natural_prompts == 0:
        return (
            "generations.num_checkable_prompts=0 generations.num_natural_prompts=0 leave no text to learn from; "
            "raise one of them"
        )
    return None


def taps(config: TrainConfig) -> str | None:
    """An EAGLE-3 head reads three layers of its target, counted from both ends."""
    num_layers = _target(config).num_layers
    if isinstance(config.drafter, Eagle3TrainingConfig) and num_layers < MIN_TAPPED_LAYERS:
        return (
            f"target.num_layers={num_layers} leaves drafter=eagle3 fewer than three different layers to read; "
            f"use {MIN_TAPPED_LAYERS} or more, or another drafter"
        )
    return None


def draft_vocabulary(config: TrainConfig) -> str | None:
    drafter, vocab_size = config.drafter, _target(config).vocab_size
    if isinstance(drafter, Eagle3TrainingConfig) and drafter.draft_vocab_size > vocab_size:
        return f"drafter.draft_vocab_size={drafter.draft_vocab_size} is more than the target's {vocab_size}; lower it"
    return None


def width(config: TrainConfig) -> str | None:
    """A narrow drafter's embedding starts as the target's in fewer dimensions."""
    drafter, hidden_size = config.drafter, _target(config).hidden_size
    if isinstance(drafter, DraftModelTrainingConfig | FrozenKvTrainingConfig) and drafter.hidden_size > hidden_size:
        return f"drafter.hidden_size={drafter.hidden_size} is wider than the target's {hidden_size}; lower it"
    return None


def kv_sources(config: TrainConfig) -> str | None:
    drafter, target = config.drafter, _target(config)
    if not isinstance(drafter, FrozenKvTrainingConfig):
        return None
    if not drafter.kv_source_layers or max(drafter.kv_source_layers) >= target.num_layers:
        return (
            f"drafter.kv_source_layers={drafter.kv_source_layers} must name layers of the target, "
            f"0 to {target.num_layers - 1}"
        )
    if drafter.num_heads % target.num_kv_heads:
        return (
            f"drafter.num_heads={drafter.num_heads} must be a multiple of the target's {target.num_kv_heads} "
            "key-value heads"
        )
    return None


MIN_TAPPED_LAYERS = 7
"""Layers 2, L // 2 and L - 3 all differ from here on."""

CHECKS: tuple[Callable[[TrainConfig], str | None], ...] = (
    nothing_to_train,
    device,
    schedule,
    heads,
    unrolled_steps,
    measured_drafts,
    prompts,
    taps,
    draft_vocabulary,
    width,
    kv_sources,
)


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """The sizes of the target, which a drafter's have to fit."""

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    vocab_size: int


def _target(config: TrainConfig) -> TargetSizes:
    """Returns the sizes of the target that is to be trained, or of the shipped one."""
    target = config.trained_target
    if target is not None:
        return TargetSizes(target.hidden_size, target.num_layers, target.num_kv_heads, config.tokenizer.vocab_size)
    shipped: dict[str, Any] = json.loads((SHIPPED_TARGET / "config.json").read_text(encoding="utf-8"))
    return TargetSizes(
        shipped["hidden_size"], shipped["num_hidden_layers"], shipped["num_key_value_heads"], shipped["vocab_size"]
    )


def _optimisations(config: TrainConfig) -> Iterator[tuple[str, OptimisationConfig]]:
    if config.trained_target is not None:
        yield "target.optimisation", config.trained_target.optimisation
    if config.trained_drafter is not None:
        yield "drafter.optimisation", config.trained_drafter.optimisation
