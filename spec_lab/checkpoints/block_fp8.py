"""fp8 matrices with a scale for each block: dequantised when they are read, or kept with target.weight_dtype=fp8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from spec_kernels.block_fp8_reference import BLOCK_SIZE
from spec_lab.checkpoints.checkpoint_files import BlockScales, Packed, StoredTensor
from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.json_input import read_json
from spec_lab.checkpoints.keep_narrow import is_product, of_each_row
from spec_lab.checkpoints.quantization import SCALES_SUFFIX, Block, read_block, scales_shape
from spec_lab.checkpoints.widening import scaled_blocks
from spec_lab.core.errors import UserError


def with_scales(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Attach the stored scales to their fp8 matrices, and remove them as separate tensors.

    Raises:
        UserError: scales that do not fit their matrix.
    """
    result = dict(stored)
    scaled = {
        name: result.pop(f"{name}{SCALES_SUFFIX}")
        for name, tensor in stored.items()
        if tensor.dtype == "F8_E4M3" and f"{name}{SCALES_SUFFIX}" in stored
    }
    if not scaled:
        return result
    block = read_block(read_json(folder / "config.json"))
    if block is None:
        return dict(stored)  # refused as left-over tensors
    for name, scales in scaled.items():
        shape = stored[name].shape
        if len(shape) != 2 or scales.shape != scales_shape(shape, block):
            raise UserError(
                f"{scales.file}: {scales.name} is {list(scales.shape)}, which does not fit {list(shape)} in blocks of "
                f"{list(block)}; take weights and config.json from the same checkpoint"
            )
        parts = {"weight": stored[name], "scales": scales}
        packed = Packed(parts, partial(dequantised, block=block))
        result[name] = replace(stored[name], scales=BlockScales(scales, block), packed=packed)
    return result


def with_products_as_stored(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Keep the fp8 products of layers as they are in the file, with their scales as separate tensors (`keep_narrow`).

    Raises:
        UserError: a block width that no kernel here supports.
    """
    result: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        result[name] = tensor
        if tensor.scales is not None and is_product(name):
            assert tensor.part is None, "a split target in e4m3 is refused earlier"
            block_rows, block_columns = tensor.scales.block
            refuse_values(str(tensor.file), {"inputs in a block": block_columns}, {"inputs in a block": (BLOCK_SIZE,)})
            form = partial(of_each_row, block_rows=block_rows, num_rows=tensor.shape[0])
            result[name] = replace(tensor, scales=None, packed=None, as_stored=True)
            result[f"{name}{SCALES_SUFFIX}"] = replace(tensor.scales.tensor, form=form, in_float32=True)
    return result


def dequantised(parts: Mapping[str, torch.Tensor], block: Block) -> torch.Tensor:
    """Multiply each block of an fp8 matrix `weight` [rows, columns] by its scale, in float32."""
    return scaled_blocks({"weight": parts["weight"], "weight_scale": parts["scales"].float()}, block)
