"""Says which quantized folders are read, and which layers can be narrow. Imports no torch. GGUF files are in `gguf`.

Only fp8 with a scale for each block is read, as in DeepSeek-V3. A matrix `X.weight` of float8_e4m3fn has its scales in
`X.weight_scale_inv`. Despite that name, values are multiplied by them (README_WEIGHTS.md of DeepSeek-V3). Blocks at the
lower and right edges may be incomplete: a matrix of 576 rows has 4.5 blocks of 128. So the block size comes from
config.json, not from the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_lab.checkpoints.config import ModelConfig

SCALES_SUFFIX = "_scale_inv"

Block = tuple[int, int]


def read_block(config: Mapping[str, Any]) -> Block | None:
    """Read the size of a checkpoint's blocks from its config.json; None if it has no fp8 weights in blocks."""
    options = config.get("quantization_config") or {}
    rows, columns = options.get("weight_block_size") or (0, 0)
    return (rows, columns) if options.get("quant_method") == "fp8" and rows else None


def problem_of_narrow(model: ModelConfig) -> str | None:
    """Return the kind of layer whose weights `target.weight_dtype` cannot round; None if it supports all layers."""
    kinds = {
        "layers of Gemma 4": model.gemma4 is not None,
        "layers of experts": any(plan.experts is not None for plan in model.layers),
        "latent attention (MLA)": any(plan.latent is not None for plan in model.layers),
        "layers that keep a state (gated delta net)": model.keeps_states,
    }
    return next((kind for kind, is_there in kinds.items() if is_there), None)


def scales_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return how many blocks a matrix has in each direction, including incomplete ones."""
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))
