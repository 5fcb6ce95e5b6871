"""How kernels widen weights of 4 bits; `four_bits_reference` describes their layout and numbers."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.block_fp8 import BLOCK
from spec_kernels.four_bits_reference import QUARTER

_QUARTER = tl.constexpr(QUARTER)


_INTEGERS = tl.constexpr(
    """{
    .reg .b32 second, third, fourth;
    shr.u32 second, $4, 4;
    shr.u32 third, $4, 8;
    shr.u32 fourth, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $1, second, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $2, third, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $3, fourth, 0x000f000f, 0x43004300, 0xea;
    }"""
)
"""The four integers of each 16 bits, plus 128: they are the last bits of 128's mantissa. The idea is Marlin's (vLLM
`marlin/dequant.h`)."""
_FLOATS = tl.constexpr(
    """{
    .reg .b32 sign, rest;
    shl.b32 sign, $4, 12;
    shl.b32 rest, $4, 6;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 $0, sign, 0x80008000, rest, 0xea;
    shl.b32 sign, $4, 8;
    shl.b32 rest, $4, 2;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 $1, sign, 0x80008000, rest, 0xea;
    shl.b32 sign, $4, 4;
    shr.u32 rest, $4, 2;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 $2, sign, 0x80008000, rest, 0xea;
    shr.u32 rest, $4, 6;
    and.b32 rest, rest, 0x01c001c0;
    lop3.b32 $3, $4, 0x80008000, rest, 0xea;
    }"""
)
"""The four floats of each 16 bits, times 2^-126: their bits are put where bfloat16 has sign, exponent and mantissa."""


@triton.jit
def _in_bfloat16(words: tl.tensor, ASM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the four numbers of each 16 bits, two words at a time."""
    return tl.inline_asm_elementwise(
        ASM,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _less_times(numbers: tl.tensor, less: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return (numbers - less) * factor in bfloat16, two at a time. Compute capability 8 has no other operation on pairs
    than `fma`; -0, which is added to the product, changes none."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 one, zero, difference;
        mov.b32 one, 0x3f803f80;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 difference, $1, one, $2;
        fma.rn.bf16x2 $0, difference, $3, zero;
        }""",
        "=r,r,r,r",
        [numbers, tl.broadcast_to(-less, numbers.shape), tl.broadcast_to(factor, numbers.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _times_twice(numbers: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return numbers * 2^63 * factor in bfloat16, two at a time."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 by, zero, nearer;
        mov.b32 by, 0x5f005f00;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 nearer, $1, by, zero;
        fma.rn.bf16x2 $0, nearer, $2, zero;
        }""",
        "=r,r,r",
        [numbers, tl.broadcast_to(factor, numbers.shape)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _quarter(words: tl.tensor, PART: tl.constexpr, IS_FLOAT: tl.constexpr) -> tl.tensor:
    """Return one of the four numbers of each 16 bits, in float32."""
    codes = (words.to(tl.int32) >> (4 * PART)) & 15
    if IS_FLOAT:
        exponents = (codes >> 1) & 3
        halves = tl.where(exponents == 0, codes & 1, ((codes & 1) + 2) << tl.maximum(exponents - 1, 0))
        codes = tl.where(codes < 8, halves, -halves)
    return codes.to(tl.float32) * (0.5 if IS_FLOAT else 1.0)


@triton.jit
def _pair(
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first_input: tl.tensor,
    IN_FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load what the inputs from `first_input` on, of one group, are multiplied by, and what is subtracted before:
    [rows, 1] each."""
    NUM_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    group = first_input // GROUP
    at = rows.to(tl.int64) * NUM_GROUPS + group
    is_group = is_row & (group < NUM_GROUPS)
    if scales_ptr.dtype.element_ty == tl.int32:
        pair = tl.load(scales_ptr + at, mask=is_group, other=0)
        factor = pair.to(tl.int16).to(DTYPE, bitcast=True)
        less = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        factor = tl.load(scales_ptr + 2 * at, mask=is_group, other=0.0)
        less = tl.load(scales_ptr + 2 * at + 1, mask=is_group, other=0.0)
    return factor[:, None], less[:, None]


@triton.jit
def _power(exponents: tl.tensor, PART: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the power of two of one group of a block [rows, 1]; in bfloat16 it is 2^63 too small."""
    exponent = ((exponents >> (8 * PART)) & 255).to(tl.int32)
    if tl.bfloat16 == DTYPE:
        power = ((exponent + 63) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        power = (exponent << 23).to(tl.float32, bitcast=True)
    return power[:, None]


@triton.jit
def four_bits_widened(
    words: tl.tensor,
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    block: tl.tensor,
    IN_FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Widen words [rows, 32] of one block of inputs to its numbers [rows, 128], rounded to DTYPE as the reference."""
    IS_FLOAT: tl.constexpr = scales_ptr.dtype.element_ty == tl.uint32
    if IS_FLOAT:
        NUM_BLOCKS: tl.constexpr = (IN_FEATURES + BLOCK - 1) // BLOCK
        exponents = tl.load(scales_ptr + rows.to(tl.int64) * NUM_BLOCKS + block, mask=is_row, other=0)
    if tl.bfloat16 == DTYPE:
        quarters = _in_bfloat16(words, _FLOATS if IS_FLOAT else _INTEGERS)
    wide = ()
    for part in tl.static_range(4):
        if IS_FLOAT:
            factor = _power(exponents, part, DTYPE)
        elif part * _QUARTER % GROUP == 0:
            factor, less = _pair(scales_ptr, rows, is_row, block * BLOCK + part * _QUARTER, IN_FEATURES, GROUP, DTYPE)
        if tl.bfloat16 == DTYPE:
            if IS_FLOAT:
                numbers = _times_twice(quarters[part], factor)
            else:
                numbers = _less_times(quarters[part], less + 128, factor)
        else:
            numbers = _quarter(words, part, IS_FLOAT)
            numbers = numbers if IS_FLOAT else numbers - less.to(tl.float32)
            numbers = (numbers * factor.to(tl.float32)).to(DTYPE)
        wide += (numbers,)  # type: ignore[assignment]
    both = tl.join(tl.join(wide[0], wide[1]), tl.join(wide[2], wide[3]))  # type: ignore[misc]
    return tl.reshape(tl.permute(both, (0, 3, 2, 1)), (words.shape[0], BLOCK))
