"""The formulas of quantised matrices: from packed integers or narrow floats, scales and zero points to [rows, inputs].

A product is rounded to the type of its scale, as the formats' own libraries do; NVFP4's is rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The absolute values of 4-bit floats; the highest bit is the sign."""
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


def packed_integers(parts: Mapping[str, Tensor], bits: int) -> Tensor:
    """compressed-tensors' `pack-quantized`: the numbers are counted from the lowest, and zero points are packed along
    the rows."""
    rows, inputs = parts["weight_shape"].tolist()
    scales, lowest = parts["weight_scale"], 2 ** (bits - 1)
    values = (unpacked(parts["weight_packed"], bits)[:, :inputs] - lowest).to(scales.dtype)
    if "weight_zero_point" in parts:
        zeros = unpacked(parts["weight_zero_point"].T, bits).T[:rows] - lowest
        values -= zeros.to(scales.dtype).repeat_interleave(inputs // zeros.shape[1], dim=1)
    return scaled(values, scales)


def narrow_numbers(parts: Mapping[str, Tensor]) -> Tensor:
    """compressed-tensors' `float-quantized` and `int-quantized`: numbers of 8 bits, scaled as a whole or by rows."""
    scales, values = parts["weight_scale"], parts["weight"]
    if "weight_zero_point" in parts:
        values = values.to(scales.dtype) - parts["weight_zero_point"].to(scales.dtype).view(-1, 1)
    return scaled(values, scales)


def scaled_blocks(parts: Mapping[str, Tensor], block: tuple[int, int]) -> Tensor:
    """The same with a scale for each block of rows and columns; the last blocks may be incomplete."""
    values, scales = parts["weight"], parts["weight_scale"]
    rows, columns = values.shape
    of_rows = scales.repeat_interleave(block[0], dim=0)[:rows]
    return values.to(scales.dtype) * of_rows.repeat_interleave(block[1], dim=1)[:, :columns]


def nvfp4(parts: Mapping[str, Tensor]) -> Tensor:
    """4-bit floats, two in a byte, the lower first; a scale in e4m3 for each 16 inputs, and one divisor of scales."""
    scales = parts["weight_scale"].to(torch.bfloat16) / parts["weight_global_scale"]
    return scaled(e2m1(parts["weight_packed"]), scales).to(torch.bfloat16)


def e2m1(packed: Tensor) -> Tensor:
    """The 4-bit floats [..., 2 * bytes] in bytes, the lower half first."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)))
    return table[torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()]


def awq(parts: Mapping[str, Tensor]) -> Tensor:
    """AWQ's `gemm`: [inputs, rows], eight rows in a word in the order 0 2 4 6 1 3 5 7, by group zero points and scales:
    (q - z) * s."""
    scales = parts["scales"]
    values, zeros = (_in_order(unpacked(parts[name], 4)) for name in ("qweight", "qzeros"))
    groups = torch.arange(len(values)) // (len(values) // len(scales))
    return ((values - zeros[groups]).to(scales.dtype) * scales[groups]).T.contiguous()


def _in_order(numbers: Tensor) -> Tensor:
    return numbers.unflatten(1, (-1, 8))[..., list(AWQ_COLUMNS)].flatten(1)


def gptq(parts: Mapping[str, Tensor], bits: int, group_size: int, zeros_off_by_one: bool) -> Tensor:
    """GPTQ: [inputs, rows], packed along the inputs, whose groups `g_idx` may name: (q - z) * s.

    In the first format of its files a zero point is stored less 1, modulo 2^bits. `group_size` -1 is all inputs.
    """
    scales = parts["scales"]
    values, zeros = unpacked(parts["qweight"].T, bits).T, unpacked(parts["qzeros"], bits)
    if zeros_off_by_one:
        zeros = (zeros + 1) & (2**bits - 1)
    size = group_size if group_size > 0 else len(values)
    groups = parts["g_idx"].long() if "g_idx" in parts else torch.arange(len(values)) // size
    return ((values - zeros[groups]).to(scales.dtype) * scales[groups]).T.contiguous()
