"""The weights of a target's products in e4m3, 8 bits, with block scales: `target.weight_dtype=fp8`.

Tensors have the names of an fp8 checkpoint (`quantization`): `X.weight` in float8_e4m3fn, and `X.weight_scale_inv`.
Here the scales have one row for each row of the weight, so that weights can be concatenated by rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from spec_kernels.block_fp8_reference import BLOCK_SIZE, num_blocks
from spec_lab.checkpoints.quantization import SCALES_SUFFIX

SCALES = f"weight{SCALES_SUFFIX}"
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LARGEST = 448.0
"""The largest number in e4m3."""


def is_product(name: str) -> bool:
    """Return whether a tensor is the weight of one of `PRODUCTS`; embeddings, norms and the head are not."""
    *_, projection, kind = ("", *name.split("."))
    return kind == "weight" and projection in PRODUCTS


def narrowed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `narrowed_in_blocks`, with scales for each row."""
    values, scales = narrowed_in_blocks(weight)
    return values, of_each_row(scales, BLOCK_SIZE, weight.shape[0])


def narrowed_in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [rows, inputs] to e4m3 after dividing each block by a scale.

    The scale makes the largest absolute value of a block 448; it is 1 for a block of zeros.

    Returns:
        The weight, and the scales [blocks of rows, blocks of inputs] as in files.
    """
    rows, columns = weight.shape
    row_blocks, column_blocks = num_blocks(rows), num_blocks(columns)
    padded = F.pad(weight.float(), (0, column_blocks * BLOCK_SIZE - columns, 0, row_blocks * BLOCK_SIZE - rows))
    blocks = padded.view(row_blocks, BLOCK_SIZE, column_blocks, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    values = (blocks / scales).view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn)
    return values, scales.view(row_blocks, column_blocks)


def of_each_row(scales: torch.Tensor, block_rows: int, num_rows: int) -> torch.Tensor:
    """Turn the scales of blocks [blocks of rows, blocks of inputs] into a row of scales for each row of the weight."""
    return scales.repeat_interleave(block_rows, dim=0)[:num_rows].contiguous()


def widened(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise an e4m3 weight with scales for each row."""
    return (values.float() * scales.repeat_interleave(BLOCK_SIZE, dim=1)[:, : values.shape[1]]).to(dtype)


def with_narrow_products(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert every product that is not yet e4m3, one after the other; other tensors are unchanged."""
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor
        if is_product(name) and tensor.dtype is not torch.float8_e4m3fn:
            result[name], result[f"{name}{SCALES_SUFFIX}"] = narrowed(tensor)
    return result


def with_wide_products(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Dequantise e4m3 products, rounding them to `dtype`; other tensors are unchanged."""
    result = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}{SCALES_SUFFIX}")
        if not name.endswith(SCALES_SUFFIX):
            result[name] = tensor if scales is None else widened(tensor, scales, dtype)
    return result
