"""The weights of a target's products in 8 or 4 bits: `target.weight_dtype=fp8|int4|mxfp4`.

Tensors have the names of an fp8 checkpoint (`quantised`): `X.weight`, and its scales in `X.weight_scale_inv`. Here
every row of a weight has its own scales, so that weights can be concatenated by rows. The experts of a layer are one
tensor [experts, rows, inputs] (`expert_checkpoint`), and their scales [experts, rows, ...] another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_kernels.block_fp8_reference import BLOCK_SIZE, num_blocks
from spec_kernels.four_bits_reference import four_bits_widened
from spec_lab.checkpoints.checkpoint_files import LazyTensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import EXPERTS

SCALES_SUFFIX = "_scale_inv"
SCALES = f"weight{SCALES_SUFFIX}"
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_PRODUCTS = ("experts.gate_up_proj", "experts.down_proj")
MIDDLES = ((0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5))
"""The numbers halfway between two 4-bit floats: those that are rounded down to the even one, and those rounded up."""


@dataclass(frozen=True, slots=True)
class NarrowForm:
    """How a weight is kept in fewer bits.

    Attributes:
        stored: the type of its numbers or codes.
        narrowed: rounds a weight [rows, inputs] of a dtype; returns numbers or codes [rows, inputs], and their scales.
        widened: returns what these stand for, in a dtype.
    """

    stored: torch.dtype
    narrowed: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    widened: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def problem_of_narrow(model: ModelConfig, form: NarrowForm | torch.dtype | None) -> str | None:
    """Return the kind of layer whose weights cannot be kept in `form`; None if it supports all layers. Experts are kept
    in 4 bits only."""
    gemma = [] if model.gemma4 is None else ["layers of Gemma 4"]
    unusual = (part for plan in model.layers for part in plan.unusual_parts)
    return next((part for part in (*gemma, *unusual) if part != EXPERTS or form not in (INT4, MXFP4)), None)


def is_product(name: str) -> bool:
    """Return whether a tensor is the weight of one of `PRODUCTS`, or of all experts of a layer; embeddings, norms,
    routers and the head are not."""
    *_, projection, kind = ("", *name.split("."))
    return (kind == "weight" and projection in PRODUCTS) or name.endswith(EXPERT_PRODUCTS)


def narrowed_to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [rows, inputs] to e4m3 after dividing each block of 128 x 128 by a scale.

    The scale makes the largest absolute value of a block 448; it is 1 for a block of zeros.
    """
    rows, columns = weight.shape
    row_blocks, column_blocks = num_blocks(rows), num_blocks(columns)
    padded = F.pad(weight.float(), (0, column_blocks * BLOCK_SIZE - columns, 0, row_blocks * BLOCK_SIZE - rows))
    blocks = padded.view(row_blocks, BLOCK_SIZE, column_blocks, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    scales = torch.where(scales > 0, scales, 1.0)
    values = (blocks / scales).view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn)
    return values, of_each_row(scales.view(row_blocks, column_blocks), BLOCK_SIZE, rows)


def of_each_row(scales: torch.Tensor, block_rows: int, num_rows: int) -> torch.Tensor:
    """Turn the scales of blocks [blocks of rows, blocks of inputs] into a row of scales for each row of the weight."""
    return scales.repeat_interleave(block_rows, dim=0)[:num_rows].contiguous()


def widened_from_fp8(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise an e4m3 weight with scales for each row."""
    return (values.float() * scales.repeat_interleave(BLOCK_SIZE, dim=1)[:, : values.shape[1]]).to(dtype)


def narrowed_to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each group of 128 inputs of a row to -8 to 7 times a multiplier, its largest absolute value by 7.5.

    So rounds compressed-tensors without calibration. Codes count from 8, the zero point; the multiplier has the
    weight's dtype.
    """
    groups = _in_groups(weight, 128)
    multipliers = (groups.abs().amax(2) / 7.5).to(weight.dtype)
    multipliers = torch.where(multipliers > 0, multipliers, 1.0)
    codes = (groups / multipliers.float().unsqueeze(2)).round_().clamp_(-8, 7) + 8
    scales = torch.stack((multipliers, torch.full_like(multipliers, 8)), dim=2)
    return codes.flatten(1)[:, : weight.shape[1]].to(torch.uint8), scales


def narrowed_to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each 32 inputs of a row to 4-bit floats times the power of two that brings their largest below 8.

    So rounds the OCP's Microscaling Formats 1.0 (section 6.3); numbers above 6 become 6.
    """
    groups = _in_groups(weight, 32)
    exponents = (groups.abs().amax(2).view(torch.int32) >> 23) - 2
    exponents.clamp_(1, 254)
    sizes = groups.abs() / (exponents << 23).view(torch.float32).unsqueeze(2)
    codes = torch.zeros_like(sizes, dtype=torch.uint8)
    for middle in MIDDLES[0]:
        codes += sizes > middle
    for middle in MIDDLES[1]:
        codes += sizes >= middle
    codes += (groups < 0).to(torch.uint8) << 3
    return codes.flatten(1)[:, : weight.shape[1]].contiguous(), exponents.to(torch.uint8)


def _in_groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Return a weight in float32, padded with zeros: [rows, groups, size]."""
    return F.pad(weight.float(), (0, -weight.shape[1] % size)).unflatten(1, (-1, size))


FP8 = NarrowForm(torch.float8_e4m3fn, narrowed_to_fp8, widened_from_fp8)
INT4 = NarrowForm(torch.uint8, narrowed_to_int4, four_bits_widened)
MXFP4 = NarrowForm(torch.uint8, narrowed_to_mxfp4, four_bits_widened)


def with_narrow_products(tensors: Mapping[str, torch.Tensor], form: NarrowForm) -> Mapping[str, torch.Tensor]:
    """Convert every product that is not yet narrow when it is read; other tensors are unchanged.

    A weight is read before its scales, which are kept until they are read, once. What an MXFP4 checkpoint has in 16
    bits beside its experts stays so, since these alone were trained for 4 bits.
    """
    if form is MXFP4 and any(name.endswith(SCALES_SUFFIX) for name in tensors):
        return tensors
    scales_of_products = (f"{name}{SCALES_SUFFIX}" for name in tensors if is_product(name))
    made = [scales for scales in scales_of_products if scales not in tensors]
    waiting: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name in made:
            return waiting.pop(name)
        weight, scales = tensors[name], f"{name}{SCALES_SUFFIX}"
        if scales not in made:
            return weight
        matrices = [form.narrowed(matrix) for matrix in (weight if weight.ndim == 3 else weight.unsqueeze(0))]
        parts = zip(*matrices, strict=True)
        values, waiting[scales] = (torch.stack(each) if weight.ndim == 3 else each[0] for each in parts)
        return values

    return LazyTensors((*tensors, *made), read)


def with_wide_products(
    tensors: Mapping[str, torch.Tensor], form: NarrowForm, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Widen narrow products, rounding them to `dtype`; other tensors are unchanged."""
    result = {}
    for name in (name for name in tensors if not name.endswith(SCALES_SUFFIX)):
        tensor, scales = tensors[name], tensors.get(f"{name}{SCALES_SUFFIX}")
        if scales is not None:  # the rows of experts are put one below the other
            by_rows = scales.flatten(0, tensor.ndim - 2)
            tensor = form.widened(tensor.flatten(0, -2), by_rows, dtype).view(tensor.shape)
        result[name] = tensor
    return result
