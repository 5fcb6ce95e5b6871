"""The formulas of quantised matrices: from packed integers or narrow floats, scales and zero points to [rows, inputs].

A product is rounded to the type of its scale, as the formats' own libraries do; NVFP4's is rounded to bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_kernels.four_bits_reference import E2M1

AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight columns."""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers in 32-bit words [rows, words], the lowest bits first: [rows, 32 / bits * words]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply values [rows, inputs] by scales: one, one for each row, or [rows, groups] of consecutive inputs."""
    wide = values.to(scales.dtype)
    if scales.numel() in (1, len(values)):
        return wide * scales.view(-1, 1)
    return (wide.view(*scales.shape, -1) * scales.unsqueeze(-1)).view_as(wide)


def packed_integers(words: Tensor, scales: Tensor, shape: Tensor, zeros: Tensor | None = None, *, bits: int) -> Tensor:
    """compressed-tensors' `pack-quantized`: the numbers are counted from the lowest, and zero points are packed along
    the rows."""
    (rows, inputs), lowest = shape.tolist(), 2 ** (bits - 1)
    values = (unpacked(words, bits)[:, :inputs] - lowest).to(scales.dtype)
    if zeros is not None:
        points = unpacked(zeros.T, bits).T[:rows] - lowest
        values -= points.to(scales.dtype).repeat_interleave(inputs // points.shape[1], dim=1)
    return scaled(values, scales)


def narrow_numbers(values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """compressed-tensors' `float-quantized` and `int-quantized`: numbers of 8 bits, scaled as a whole or by rows."""
    if zeros is not None:
        values = values.to(scales.dtype) - zeros.to(scales.dtype).view(-1, 1)
    return scaled(values, scales)


def scaled_blocks(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The same with a scale for each block of rows and columns; the last blocks may be incomplete."""
    rows, columns = values.shape
    of_rows = scales.repeat_interleave(block[0], dim=0)[:rows]
    return values.to(scales.dtype) * of_rows.repeat_interleave(block[1], dim=1)[:, :columns]


def nvfp4(packed: Tensor, scales: Tensor, divisor: Tensor) -> Tensor:
    """4-bit floats, two in a byte, the lower first; a scale in e4m3 for each 16 inputs, and one divisor of scales."""
    return scaled(e2m1(packed), scales.to(torch.bfloat16) / divisor).to(torch.bfloat16)


def e2m1(packed: Tensor) -> Tensor:
    """The 4-bit floats [..., 2 * bytes] in bytes, the lower half first."""
    return torch.tensor(E2M1)[torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()]


def awq(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ's `gemm`: [inputs, rows], eight rows in a word in the order 0 2 4 6 1 3 5 7, by group zero points and scales:
    (q - z) * s."""
    values, points = (
        unpacked(packed, 4).unflatten(1, (-1, 8))[..., list(AWQ_COLUMNS)].flatten(1) for packed in (words, zeros)
    )
    groups = torch.arange(len(values)) // (len(values) // len(scales))
    return ((values - points[groups]).to(scales.dtype) * scales[groups]).T.contiguous()


def gptq(
    words: Tensor,
    zeros: Tensor,
    scales: Tensor,
    named_groups: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    zeros_off_by_one: bool,
) -> Tensor:
    """GPTQ: [inputs, rows], packed along the inputs, whose groups `g_idx` may name: (q - z) * s.

    In the first format of its files a zero point is stored less 1, modulo 2^bits. `group_size` -1 is all inputs.
    """
    values, points = unpacked(words.T, bits).T, unpacked(zeros, bits)
    if zeros_off_by_one:
        points = (points + 1) & (2**bits - 1)
    size = group_size if group_size > 0 else len(values)
    groups = torch.arange(len(values)) // size if named_groups is None else named_groups.long()
    return ((values - points[groups]).to(scales.dtype) * scales[groups]).T.contiguous()
