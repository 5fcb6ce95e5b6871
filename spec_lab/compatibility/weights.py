"""Refuses targets whose weights cannot be kept as `target.weight_dtype` asks. Functions like those of
`compatibility.run`; imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.assembly import registry
from spec_lab.assembly.option import TargetOption
from spec_lab.config import RunConfig, WeightDtype
from spec_lab.errors import UserError
from spec_lab.models.families.table import read_model_config
from spec_lab.models.quantization import problem_of_fp8

REMEDY = "use target.weight_dtype=auto"


def fp8_layers(config: RunConfig) -> str | None:
    """Every layer must have products in e4m3, as its config.json says; one that cannot be read is refused where it is
    needed."""
    option = registry.of(config).find(TargetOption, config.target.name)
    if config.target.weight_dtype != WeightDtype.fp8 or any(refusal(config) for refusal in option.refusals):
        return None
    try:
        model = read_model_config(option.folder(config.target))
    except UserError:
        return None
    problem = problem_of_fp8(model)
    return (
        None
        if problem is None
        else f"target.weight_dtype=fp8 is for plain attention and MLPs, and the target has {problem}; {REMEDY}"
    )


def fp8_in_one_process(config: RunConfig) -> str | None:
    """Blocks of a split weight would not be those of the whole."""
    size = config.target.tensor_parallel
    if config.target.weight_dtype != WeightDtype.fp8 or size == 1:
        return None
    return f"target.tensor_parallel={size} splits no weights in fp8; {REMEDY}, or target.tensor_parallel=1"


def fp8_by_our_products(config: RunConfig) -> str | None:
    """The library multiplies no 16-bit rows by e4m3: a weight would be widened in memory for every round."""
    if config.target.weight_dtype != WeightDtype.fp8 or config.row_invariant:
        return None
    return f"row_invariant=false takes the library's products, which has none for target.weight_dtype=fp8; {REMEDY}"


WEIGHT_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (fp8_layers, fp8_in_one_process, fp8_by_our_products)
