"""Weights in e4m3, an 8-bit floating point format, with a float32 scale for each block of 128 inputs and 128 rows, or
of 128 inputs of one row.

DeepSeek-V3 is published in blocks of 128 rows, and the engines (vLLM, SGLang) run it. Here only weights are e4m3. A
round of few rows takes as long as reading its weights, so narrow activations would save nothing.

In memory two inputs of a block share 16 bits. Input i has the bits where bfloat16 has them: the sign and bits 4 to 10.
Input 64 + i has the other bits. So one instruction extracts two numbers from a register, and five extract the other
two, without permuting the rows. The idea is Marlin's (vLLM `marlin/dequant.h`), which orders the numbers as its tensor
core instructions read them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK_SIZE = 128
"""The number of rows, and of inputs, in a block."""


def num_blocks(length: int) -> int:
    """Count the blocks of `length`, rounded up."""
    return -(-length // BLOCK_SIZE)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Pack an e4m3 weight [rows, inputs] for the kernels: [rows, 64 * blocks of inputs] int16, zero-padded."""
    assert weight.dtype is torch.float8_e4m3fn
    num_rows, in_features = weight.shape
    blocks = num_blocks(in_features)
    codes = F.pad(weight.contiguous().view(torch.uint8), (0, blocks * BLOCK_SIZE - in_features))
    low, high = codes.view(num_rows, blocks, 2, BLOCK_SIZE // 2).to(torch.int16).unbind(2)
    low = (low & 0x80) << 8 | (low & 0x7F) << 4
    # Unpacking shifts the sign and the four last bits up by four places, and the others down.
    high = (high & 0x80) << 4 | (high & 0x0F) | (high & 0x70) << 8
    return (low | high).view(num_rows, -1)


def unpacked(weight: torch.Tensor, in_features: int) -> torch.Tensor:
    """Unpack a packed weight to [rows, inputs] float8_e4m3fn."""
    num_rows = weight.shape[0]
    pairs = weight.view(num_rows, -1, BLOCK_SIZE // 2).to(torch.int32)
    low = (pairs >> 8 & 0x80) | (pairs >> 4 & 0x7F)
    high = (pairs >> 4 & 0x80) | (pairs & 0x0F) | (pairs >> 8 & 0x70)
    codes = torch.stack((low, high), dim=2).view(num_rows, -1)[:, :in_features]
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def rows_of_scale(weight: torch.Tensor, scales: torch.Tensor, num_rows: int, in_features: int) -> int:
    """Check a packed weight and its scales; return how many of its rows share a row of scales: 128, or 1."""
    blocks, row_blocks = num_blocks(in_features), num_blocks(num_rows)
    assert weight.dtype is torch.int16 and weight.shape == (num_rows, blocks * BLOCK_SIZE // 2)
    assert scales.dtype is torch.float32 and weight.is_contiguous() and scales.is_contiguous()
    assert scales.shape in ((row_blocks, blocks), (num_rows, blocks))
    return BLOCK_SIZE if scales.shape[0] == row_blocks else 1


def dequantise_reference(out: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Do what `widen` does with such a weight."""
    num_rows, in_features = out.shape
    of_rows = scales.repeat_interleave(rows_of_scale(weight, scales, num_rows, in_features), dim=0)[:num_rows]
    of_numbers = of_rows.repeat_interleave(BLOCK_SIZE, dim=1)[:, :in_features]
    out.copy_(unpacked(weight, in_features).float() * of_numbers)
