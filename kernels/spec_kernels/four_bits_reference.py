"""Weights of 4 bits with scales for groups of inputs of a row: int4 and MXFP4.

int4 is what AWQ, GPTQ and compressed-tensors store: integers 0 to 15, and for each group of 32, 64 or 128 inputs a
multiplier and a zero point, which is an integer too. A number is (code - zero point) * multiplier. MXFP4 (OCP
Microscaling Formats 1.0) has 4-bit floats, and for each 32 inputs a power of two, whose exponent plus 127 is a byte.
A number is rounded to the dtype of the rows, as in the formats' own libraries, so a product has the same weights
however it is computed. A product of few rows takes as long as reading its weight, so only weights are narrow.

In memory four inputs of a block of 128 share 16 bits: input i has the lowest four, then come 32 + i, 64 + i, 96 + i.
So a kernel widens 32 consecutive inputs, a group of MXFP4, by the same instructions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_kernels.block_fp8_reference import BLOCK_SIZE, dequantise_reference, num_blocks

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit floats by code: a bit of sign, two of exponent, one of mantissa."""
GROUP_SIZES = (128, 64, 32)
QUARTER = BLOCK_SIZE // 4


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [rows, inputs] uint8 for the kernels: [rows, 32 * blocks of inputs] int16, padded with zeros."""
    num_rows, in_features = codes.shape
    padded = F.pad(codes, (0, num_blocks(in_features) * BLOCK_SIZE - in_features)).to(torch.int16)
    first, second, third, fourth = padded.view(num_rows, -1, 4, QUARTER).unbind(2)
    return (first | second << 4 | third << 8 | fourth << 12).view(num_rows, -1)


def unpacked_codes(weight: torch.Tensor, in_features: int) -> torch.Tensor:
    """Unpack what `packed_codes` returns to [rows, inputs] uint8."""
    words = weight.view(weight.shape[0], -1, QUARTER).to(torch.int32)
    codes = torch.stack([words >> 4 * part & 15 for part in range(4)], dim=2)
    return codes.view(weight.shape[0], -1)[:, :in_features].to(torch.uint8)


def group_size(scales: torch.Tensor, in_features: int) -> int:
    """Return how many inputs share a scale: 32 in MXFP4; for int4 the largest size with as many groups as there are
    scales."""
    if scales.dtype is torch.uint8:
        return QUARTER
    return next(size for size in GROUP_SIZES if -(-in_features // size) == scales.shape[1])


def packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Pad the exponents of MXFP4 [rows, groups] to four for each block of inputs, as the kernels load them: a program
    fetches 4 bytes ahead of their use, but not one. Those of int4 stay as they are."""
    return F.pad(scales, (0, -scales.shape[1] % 4)) if scales.dtype is torch.uint8 else scales


def is_four_bits(scales: torch.Tensor) -> bool:
    """Return whether scales are those of 4 bits: int4's are pairs, and MXFP4's are bytes; those of e4m3 are neither."""
    return scales.ndim == 3 or scales.dtype is torch.uint8


def inputs_of_scale(
    weight: torch.Tensor, scales: torch.Tensor, num_rows: int, in_features: int, dtype: torch.dtype
) -> int:
    """Check a packed weight and its scales for rows of `dtype`; return how many inputs share a scale."""
    assert weight.dtype is torch.int16 and weight.shape == (num_rows, num_blocks(in_features) * QUARTER)
    assert weight.is_contiguous() and scales.is_contiguous() and scales.shape[0] == num_rows
    if scales.ndim == 2:
        assert scales.dtype is torch.uint8 and scales.shape[1] == 4 * num_blocks(in_features)
    else:
        assert scales.dtype is dtype and scales.shape[2] == 2
    return group_size(scales, in_features)


def pairs_of(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as the kernels read them: a multiplier and a zero point of 16 bits as one number, and so the four
    exponents of a block."""
    if scales.dtype is torch.uint8:
        return scales.view(torch.uint32)
    return scales.view(torch.int32) if scales.ndim == 3 and scales.element_size() == 2 else scales


def four_bits_widened(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of codes [rows, inputs], rounded to `dtype`.

    Args:
        scales: for int4 [rows, groups, 2] multipliers and zero points, in `dtype`; for MXFP4 [rows, groups or
            more] uint8.
    """
    size, in_features = group_size(scales, codes.shape[1]), codes.shape[1]
    of_inputs = scales.repeat_interleave(size, dim=1)[:, :in_features]
    if scales.ndim == 2:
        powers = (of_inputs.to(torch.int32) << 23).view(torch.float32)
        return (torch.tensor(E2M1, device=codes.device)[codes.long()] * powers).to(dtype)
    multipliers, zero_points = of_inputs.unbind(2)
    return (codes.to(scales.dtype) - zero_points).mul_(multipliers).to(dtype)


def widen_reference(out: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the numbers of a packed weight, of 4 or of 8 bits, to `out` [rows, inputs]."""
    if is_four_bits(scales):
        out.copy_(four_bits_widened(unpacked_codes(weight, out.shape[1]), scales, out.dtype))
    else:
        dequantise_reference(out, weight, scales)
