"""Checks whether the target's weights can be stored as `target.weight_dtype` says.

Each function is a check, as in `menu.refusals.run`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.quantization import problem_of_fp8
from spec_lab.core.errors import UserError
from spec_lab.menu.choices import Dtype, KernelsChoice, WeightDtype
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.devices import runs_on_cuda

REMEDY = "use target.weight_dtype=auto"


def model_of(chosen: Chosen) -> ModelConfig | None:
    """Read the target's config.json; None if it cannot be read or its option refuses the run, which is said
    elsewhere."""
    if any(refusal(chosen.config) for refusal in chosen.target.refusals):
        return None
    try:
        return read_model_config(chosen.target_folder)
    except (UserError, OSError):
        return None


def narrow_layers(chosen: Chosen) -> str | None:
    """For fp8 or bfloat16 weights, every layer in config.json must be one whose products support 8-bit weights."""
    narrow = chosen.config.target.weight_dtype
    model = model_of(chosen) if narrow != WeightDtype.auto else None
    if model is None:
        return None
    problem = problem_of_fp8(model)
    return (
        None
        if problem is None
        else f"target.weight_dtype={narrow} is for plain attention and MLPs, but the target has {problem}; {REMEDY}"
    )


def bfloat16_in_c(chosen: Chosen) -> str | None:
    """target.weight_dtype=bfloat16 is for the kernels in C, which compute in float32. Other products need weights of
    the rows' type."""
    config = chosen.config
    if config.target.weight_dtype != WeightDtype.bfloat16 or config.kernels == KernelsChoice.native:
        return None
    return (
        f"target.weight_dtype=bfloat16 is for kernels=native, not kernels={config.kernels}; use kernels=native "
        "device=cpu, or dtype=bfloat16 target.weight_dtype=auto"
    )


def fp8_in_one_process(chosen: Chosen) -> str | None:
    """fp8 needs one process, since the blocks of a split weight would differ from those of the whole."""
    config = chosen.config
    size = config.target.tensor_parallel
    if config.target.weight_dtype != WeightDtype.fp8 or size == 1:
        return None
    return f"target.tensor_parallel={size} cannot split weights in fp8; {REMEDY}, or target.tensor_parallel=1"


def fp8_by_our_products(chosen: Chosen) -> str | None:
    """On a GPU fp8 needs our products: the library cannot multiply 16-bit rows by e4m3, and would convert weights in
    every forward."""
    config = chosen.config
    if config.target.weight_dtype != WeightDtype.fp8 or not runs_on_cuda(config.device):
        return None
    wrong = {
        f"kernels={config.kernels}": config.kernels != KernelsChoice.triton,
        "dtype=float32": config.dtype == Dtype.float32,
        "row_invariant=false": not config.row_invariant,
    }
    named = next((knob for knob, is_wrong in wrong.items() if is_wrong), None)
    if named is None:
        return None
    return (
        f"{named} does not support target.weight_dtype=fp8 on a GPU; use kernels=triton dtype=bfloat16 "
        "row_invariant=true, or target.weight_dtype=auto"
    )


WEIGHT_CHECKS: tuple[Callable[[Chosen], str | None], ...] = (
    narrow_layers,
    bfloat16_in_c,
    fp8_in_one_process,
    fp8_by_our_products,
)
