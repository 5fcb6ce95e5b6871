"""Checks for trainings that are not possible, made before anything is built or loaded.

Each check looks at a whole configuration, and returns None or one line with the knob and the remedy. Its docstring says
what must hold. The schema checks the bounds of numbers. A file that a check cannot read raises UserError. Only the
check of `drafter.body` imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.errors import UserError
from spec_lab.menu.bounds import out_of_bounds
from spec_lab.menu.choices import Dtype, LoggerMode
from spec_lab.menu.refusals.run import refuse_output_dir
from spec_lab.options.shipped import ZOO
from spec_lab.train.config import TrainConfig
from spec_lab.train.fitting import Fitting, TargetSizes, decay_is_read, filled
from spec_lab.train.module_config import LayerConfig, OptimisationConfig
from spec_lab.train.options import TARGETS, drafter_option, target_option
from spec_lab.train.texts.prompts import read_prompts, refuse_missing
from spec_lab.train.texts.settings import sampling_problem

SHIPPED_TARGET = ZOO / "pocket"


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


def nothing_to_train(config: TrainConfig) -> str | None:
    """A training trains a target or a drafter."""
    if config.trained_target is None and config.trained_drafter is None:
        name = target_option(config.target).name
        return f"target={name} drafter=none leaves nothing to train; choose target=pocket or a drafter"
    return None


def output_folder(config: TrainConfig) -> str | None:
    """The folder of the training can be written."""
    return refuse_output_dir(config.output_dir)


def device(config: TrainConfig) -> str | None:
    """The device is one that is known."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", config.device):
        return None
    return f"device={config.device} is unknown; use device=auto, cpu, cuda or cuda:1"


def dtype(config: TrainConfig) -> str | None:
    """A drafter's weights are float32; its products and its target may be in bfloat16."""
    if config.dtype == Dtype.float16:
        return "dtype=float16 cannot represent small gradients; use dtype=bfloat16 or dtype=float32"
    if config.dtype != Dtype.auto and target_option(config.target).path is None:
        return f"dtype={config.dtype} is not read by this target; leave it out, or choose target=hf"
    return None


def schedule(config: TrainConfig) -> str | None:
    """Warm-up is shorter than the training. An interval of the loss curve is at most as long as the training."""
    for prefix, optimisation in _optimisations(config):
        for knob in ("num_warmup_steps", "log_every"):
            value, most = getattr(optimisation, knob), optimisation.num_steps - (knob == "num_warmup_steps")
            if value > most:
                return (
                    f"{prefix}.{knob}={value} does not fit {prefix}.num_steps={optimisation.num_steps}; "
                    f"use {prefix}.{knob}={most}"
                )
    return None


def prompts(config: TrainConfig) -> str | None:
    """A drafter that learns from the target's generations has at least one prompt for them."""
    texts, is_read = config.generations, config.target.writes_texts and target_option(config.target).path is None
    if is_read and config.trained_drafter is not None and texts.num_checkable_prompts == texts.num_natural_prompts == 0:
        return (
            "generations.num_checkable_prompts=0 generations.num_natural_prompts=0 leave no text to learn from; "
            "use generations.num_natural_prompts=10000"
        )
    return None


def target_fits(config: TrainConfig) -> str | None:
    """The `target` part passes the checks of its option in `spec_lab.train.options`."""
    found = (refusal(config.target) for refusal in target_option(config.target).refusals)
    return next((message for message in found if message is not None), None)


WHY_NOT = {
    "mtp_vanilla": "one module for each draft costs more than one that is used again; use drafter=mtp_eagle",
    "nextn": "it is trained only for target=pocket_hybrid and target=pocket_moe; use drafter=mtp_eagle",
}
"""Why a drafter cannot be trained for a target such as hf, with the remedy."""


def drafter_of_target(config: TrainConfig) -> str | None:
    """The drafter is one that is trained for the target."""
    option, name = target_option(config.target), config.drafter.name
    if name == "none" or name in option.drafters:
        return None
    if option.path is not None and name in WHY_NOT:
        return f"drafter={name} is not trained for target={option.name}: {WHY_NOT[name]}"
    others = ", ".join(f"target={other.name}" for other in TARGETS if name in other.drafters)
    return (
        f"drafter={name} is not trained for target={option.name}, but for {others}; use drafter={option.drafters[0]}, "
        "or drafter=none"
    )


def frozen_target(config: TrainConfig) -> str | None:
    """A target such as hf can be run over packed rows: its layers support them, and its positions suffice."""
    option, name = target_option(config.target), config.drafter.name
    if option.path is None or name == "none":
        return None
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


def prompt_loss(config: TrainConfig) -> str | None:
    """In packed rows only the target's own tokens are learnt."""
    weight = getattr(config.drafter, "prompt_loss_weight", 0)
    if target_option(config.target).path is None or not weight:
        return None
    return f"drafter.prompt_loss_weight={weight:g} is not read for this target; use drafter.prompt_loss_weight=0"


def drafter_fits(config: TrainConfig) -> str | None:
    """The drafter fits the target and the evaluation, by the checks of its option in `spec_lab.train.options`."""
    target = target_sizes(config)
    fitting = Fitting(config, filled(config.drafter, target), target)
    found = (refusal(fitting) for refusal in (decay_is_read, *drafter_option(config.drafter).refusals))
    return next((message for message in found if message is not None), None)


def texts_folder(config: TrainConfig) -> str | None:
    """For a target such as hf, the folder of texts exists, or the target can write texts first."""
    if target_option(config.target).path is None:
        return None if config.texts is None else "texts is not read by this target, which has its own; leave texts out"
    if config.texts is not None:
        if Path(config.texts).is_dir():
            return None
        return (
            f"texts={config.texts} is not a folder; write texts with python -m spec_lab.train.texts, or leave texts out"
        )
    refuse_missing(config.prompts)
    return sampling_problem(config.writing, "writing.", bool(config.prompts))


def tracking(config: TrainConfig) -> str | None:
    """With a project, W&B accepts the names and settings, and the target is one such as hf."""
    logger = config.logger
    if logger.project is None:
        unread = {"entity": logger.entity is not None, "mode": logger.mode != LoggerMode.auto}
        name = next((name for name, is_set in unread.items() if is_set), None)
        return name and f"logger.{name} is not read without a project; leave it out, or add logger.project=spec_lab"
    if target_option(config.target).path is None:
        return "logger.project is not read by this target; leave it out, or choose target=hf"
    return None


def other_layouts(config: TrainConfig) -> str | None:
    """Each project in `layouts` has a layout that can hold this drafter."""
    if config.layouts and target_option(config.target).path is None:
        return "layouts is not read by this target; leave it out, or choose target=hf"
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
    if config.evaluation.prompts and target_option(config.target).path is None:
        return "evaluation.prompts is not read by this target; leave it out, or choose target=hf"
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
    nothing_to_train,
    output_folder,
    device,
    dtype,
    schedule,
    target_fits,
    drafter_of_target,
    prompts,
    frozen_target,
    prompt_loss,
    texts_folder,
    tracking,
    other_layouts,
    evaluation_prompts,
    drafter_fits,
)


def target_sizes(config: TrainConfig) -> TargetSizes:
    """Return the sizes of the target: one to be trained, the shipped one, or one such as hf.

    Raises:
        UserError: the target cannot be read.
    """
    path = target_option(config.target).path
    if path is not None:
        return sizes_of(read_model_config(path(config.target)))
    shipped, target = sizes_of(read_model_config(SHIPPED_TARGET)), config.trained_target
    if target is None:
        return replace(shipped, kv_layers=None)
    vocab_size = config.tokenizer.vocab_size if config.target.own_vocabulary else shipped.vocab_size
    own = {name: getattr(target, name) for name in asdict(LayerConfig()) if isinstance(target, LayerConfig)}
    return TargetSizes(target.hidden_size, target.num_layers, target.key_value_heads(), vocab_size, LayerConfig(**own))


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


def _optimisations(config: TrainConfig) -> Iterator[tuple[str, OptimisationConfig]]:
    if config.trained_target is not None:
        yield "target.optimisation", config.trained_target.optimisation
    if config.trained_drafter is not None:
        yield "drafter.optimisation", config.trained_drafter.optimisation
