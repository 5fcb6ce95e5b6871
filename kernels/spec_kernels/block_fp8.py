"""What kernels do with e4m3 weights and block scales; `block_fp8_reference` describes their layout."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.block_fp8_reference import BLOCK_SIZE

BLOCK = tl.constexpr(BLOCK_SIZE)


@triton.jit
def load_scale(
    scales_ptr: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    block: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:
    """Load, for one block of inputs, the scales of the weight's rows `first + columns`.

    Their shape broadcasts against a tile of sums. If every tile is within one block of rows, it is a single scale.
    """
    scales_ptr += block
    NUM_BLOCKS: tl.constexpr = (IN_FEATURES + BLOCK - 1) // BLOCK
    if WHOLE_TILES and SCALE_ROWS % COLUMN_TILE == 0:
        scale = tl.load(scales_ptr + (first + tl.program_id(0) * COLUMN_TILE) // SCALE_ROWS * NUM_BLOCKS)
    else:
        scale = tl.load(
            scales_ptr + (first + columns) // SCALE_ROWS * NUM_BLOCKS, mask=columns < out_features, other=0.0
        )
        scale = scale[:, None] if TURNED else scale[None, :]
    return scale


@triton.jit
def widened(weight: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Widen packed pairs of e4m3 numbers [rows, 64] to [rows, 128], exactly, but too small by the factor
    `multiplier`."""
    if tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 up, down;
            and.b32 $0, $2, 0x87f087f0;
            shl.b32 up, $2, 4;
            shr.u32 down, $2, 4;
            and.b32 up, up, 0x80f080f0;
            and.b32 down, down, 0x07000700;
            or.b32 $1, up, down;
            }""",
            "=r,=r,r",
            [weight],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = float16_of(weight).to(DTYPE)
        high = float16_of(((weight << 4) & -32528) | ((weight >> 4) & 0x0700)).to(DTYPE)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (weight.shape[0], 2 * weight.shape[1]))


@triton.jit
def float16_of(bits: tl.tensor) -> tl.tensor:
    """Return as float16 the e4m3 numbers whose bits are at bfloat16's places: the sign, and bits 4 to 10.

    Bits at other places are ignored. The values are the true ones, so `multiplier` is 1.
    """
    bits = (bits & -32768) | ((bits & 0x07F0) << 3)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def multiplier(DTYPE: tl.constexpr) -> tl.constexpr:
    """Return the factor that corrects e4m3 bits read as bfloat16, whose exponent bias is 127 instead of 7; 1 for other
    types."""
    return 2.0**120 if tl.bfloat16 == DTYPE else 1.0
