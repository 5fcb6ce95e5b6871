"""Checks for trainings that are not possible, made before anything is built or loaded.

Each check looks at a whole configuration, and returns None or one line with the knob and the remedy. Its docstring says
what must hold. The schema checks the bounds of numbers. A file that a check cannot read raises UserError. Only the
check of `drafter.body` imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.config.checks import out_of_bounds
from spec_lab.config.choices import Dtype, LoggerMode
from spec_lab.core.errors import UserError
from spec_lab.train.config import TrainConfig
from spec_lab.train.fitting import Fitting, TargetSizes, decay_is_read, filled
from spec_lab.train.module_config import LayerConfig
from spec_lab.train.options import drafter_option, target_option
from spec_lab.train.texts.prompts import read_prompts, refuse_missing
from spec_lab.train.texts.settings import sampling_problem


def refuse(config: TrainConfig) -> None:
    """Raise UserError with the first of the `refusals`, if there is one. Later checks are not run."""
    first = next(_reasons(config), None)
    if first is not None:
        raise UserError(first)


def refusals(config: TrainConfig) -> list[str]:
    """Return reasons against the training, one line each; empty if it may start.

    Knobs that are out of bounds come first: as long as there are any, the checks are not run.

    Raises:
        UserError: a check cannot read a file.
    """
    return list(_reasons(config))


def _reasons(config: TrainConfig) -> Iterator[str]:
    outside = out_of_bounds(config)
    yield from outside or (message for check in CHECKS if (message := check(config)) is not None)


def device(config: TrainConfig) -> str | None:
    """The device is one that is known."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", config.device):
        return None
    return f"device={config.device} is unknown; use device=auto, cpu, cuda or cuda:1"


def dtype(config: TrainConfig) -> str | None:
    """A drafter's weights are float32; its products and its target may be in bfloat16."""
    if config.dtype == Dtype.float16:
        return "dtype=float16 cannot represent small gradients; use dtype=bfloat16 or dtype=float32"
    return None


def schedule(config: TrainConfig) -> str | None:
    """Warm-up is shorter than the training. An interval of the loss curve is at most as long as the training."""
    prefix, optimisation = "drafter.optimisation", config.drafter.optimisation
    for knob in ("num_warmup_steps", "log_every"):
        value, most = getattr(optimisation, knob), optimisation.num_steps - (knob == "num_warmup_steps")
        if value > most:
            return (
                f"{prefix}.{knob}={value} does not fit {prefix}.num_steps={optimisation.num_steps}; "
                f"use {prefix}.{knob}={most}"
            )
    return None


def target_fits(config: TrainConfig) -> str | None:
    """The `target` part passes the checks of its option in `spec_lab.train.options`."""
    found = (refusal(config.target) for refusal in target_option(config.target).refusals)
    return next((message for message in found if message is not None), None)


def frozen_target(config: TrainConfig) -> str | None:
    """The target can be run over packed rows: its layers support them, and its positions suffice."""
    option, name = target_option(config.target), config.drafter.name
    found = read_model_config(option.path(config.target))
    if any(plan.latent is not None for plan in found.layers):
        return f"drafter={name}: heads are not trained for targets with latent attention; take another target"
    if found.keeps_states:
        return f"drafter={name}: heads are not trained for targets whose layers keep a state; take another target"
    positions, row_length = found.max_position_embeddings, config.packing.row_length
    if row_length > positions:
        return (
            f"packing.row_length={row_length} is more than the target's {positions} positions; lower it to {positions}"
        )
    num_steps = getattr(config.drafter, "num_unrolled_steps", 1)
    if num_steps >= row_length:
        return (
            f"packing.row_length={row_length} is too short for drafter.num_unrolled_steps={num_steps}; use "
            f"packing.row_length={num_steps + 1}"
        )
    if config.evaluation.max_new_tokens >= positions:
        return (
            f"evaluation.max_new_tokens={config.evaluation.max_new_tokens} leaves no room for a prompt in the target's "
            f"{positions} positions; use evaluation.max_new_tokens={positions // 2}"
        )
    return None


def drafter_fits(config: TrainConfig) -> str | None:
    """The drafter fits the target and the evaluation, by the checks of its option in `spec_lab.train.options`."""
    target = target_sizes(config)
    fitting = Fitting(config, filled(config.drafter, target), target)
    found = (refusal(fitting) for refusal in (decay_is_read, *drafter_option(config.drafter).refusals))
    return next((message for message in found if message is not None), None)


def texts_folder(config: TrainConfig) -> str | None:
    """The folder of texts exists, or the target can write texts first."""
    if config.texts is not None:
        if Path(config.texts).is_dir():
            return None
        return (
            f"texts={config.texts} is not a folder; write texts with python -m spec_lab.train.texts, or leave texts out"
        )
    refuse_missing(config.prompts)
    return sampling_problem(config.writing, "writing.", bool(config.prompts))


def tracking(config: TrainConfig) -> str | None:
    """With a project, W&B accepts the names and settings."""
    logger = config.logger
    if logger.project is None:
        unread = {"entity": logger.entity is not None, "mode": logger.mode != LoggerMode.auto}
        name = next((name for name, is_set in unread.items() if is_set), None)
        return name and f"logger.{name} is not read without a project; leave it out, or add logger.project=spec_lab"
    return None


def other_layouts(config: TrainConfig) -> str | None:
    """Each project in `layouts` has a layout that can hold this drafter."""
    known = drafter_option(config.drafter).layouts
    for name in config.layouts:
        if name not in known:
            use = f"use layouts=[{','.join(known)}], or leave it out" if known else "leave it out"
            return f"layouts=[{name}] is not known for drafter={config.drafter.name}; {use}"
        if (part := known[name].lacks(config.drafter)) is not None:
            return f"layouts=[{name}] cannot hold {part}; change that key, or leave out layouts"
    return None


def evaluation_prompts(config: TrainConfig) -> str | None:
    """The files of questions exist and have questions, none of the category `all`, which cards use for the total."""
    for file in config.evaluation.prompts:
        if not Path(file).is_file():
            return f"evaluation.prompts: there is no file {file}; give JSON Lines with turns, messages or prompt"
        questions = read_prompts([file], 0, allow_tests=True)[0]
        if not questions:
            return f"evaluation.prompts: {file} has no question; give JSON Lines with turns, messages or prompt"
        if any(question.category == "all" for question in questions):
            return (
                f"evaluation.prompts: {file} has a category all, which is a card's "
                "name for all categories; give it another name"
            )
    return None


CHECKS: tuple[Callable[[TrainConfig], str | None], ...] = (
    device,
    dtype,
    schedule,
    target_fits,
    frozen_target,
    texts_folder,
    tracking,
    other_layouts,
    evaluation_prompts,
    drafter_fits,
)


def target_sizes(config: TrainConfig) -> TargetSizes:
    """Return the sizes of the target.

    Raises:
        UserError: the target cannot be read.
    """
    return sizes_of(read_model_config(target_option(config.target).path(config.target)))


def sizes_of(model: ModelConfig) -> TargetSizes:
    """Return the sizes of an existing target."""
    plan, readable = model.layers[-1], readable_layers(model)
    layer = LayerConfig(plan.intermediate_size, plan.num_heads, plan.num_kv_heads, plan.head_dim)
    kv_heads = model.layers[readable[-1]].num_kv_heads if readable else plan.num_kv_heads
    return TargetSizes(model.hidden_size, model.num_layers, kv_heads, model.vocab_size, layer, readable)


def readable_layers(model: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose keys an assistant can read.

    They have full attention, own their keys, and use a RoPE that the assistant's config can express. Their sizes and
    their RoPE equal those of the last such layer.
    """
    found = [
        (index, (plan.num_kv_heads, plan.head_dim, plan.rope))
        for index, plan in enumerate(model.layers)
        if plan.window is None and plan.kv_owner is None and plan.latent is None and plan.delta_net is None
        if plan.rope.scaling == "proportional" or (plan.rope.scaling, plan.rope.partial_rotary_factor) == ("none", 1.0)
    ]
    return tuple(index for index, sizes in found if sizes == found[-1][1])
