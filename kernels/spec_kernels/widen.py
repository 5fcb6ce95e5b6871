"""Widens a weight of 8 or 4 bits in memory, for the products of more rows than ours take."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.block_fp8 import BLOCK, multiplier, widened
from spec_kernels.block_fp8_reference import rows_of_scale
from spec_kernels.four_bits import four_bits_widened
from spec_kernels.four_bits_reference import inputs_of_scale, is_four_bits, pairs_of
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

ROWS_OF_PROGRAM = 32


@triton.jit(do_not_specialize=["num_rows"])
def _widen(
    out_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> None:
    """Widens a tile of rows in one block of inputs. SCALED is that of `ProductForm`."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    block, is_row = tl.program_id(1), row < num_rows
    NUM_BLOCKS: tl.constexpr = (IN_FEATURES + BLOCK - 1) // BLOCK
    WORDS: tl.constexpr = BLOCK // 4 if SCALED < 0 else BLOCK // 2
    at = row.to(tl.int64)[:, None] * (NUM_BLOCKS * WORDS) + block * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(weight_ptr + at, mask=is_row[:, None], other=0, eviction_policy="evict_first")
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if SCALED < 0:
        wide = four_bits_widened(words, scales_ptr, row, is_row, block, IN_FEATURES, -SCALED, DTYPE)
    else:
        scale = tl.load(scales_ptr + row // SCALED * NUM_BLOCKS + block, mask=is_row, other=0.0)[:, None]
        wide = (widened(words, DTYPE).to(tl.float32) * multiplier(DTYPE) * scale).to(DTYPE)
    inputs = block * BLOCK + tl.arange(0, BLOCK)
    inside = is_row[:, None] & (inputs < IN_FEATURES)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * IN_FEATURES + inputs[None, :], wide, mask=inside)


@operator("widen", mutates_args=("out",))
def widen(out: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the numbers of a packed weight, times their scales, rounded once to the dtype of `out`.

    Args:
        out: [rows, inputs], contiguous, written.
        weight: as returned by `block_fp8_reference.packed` or `four_bits_reference.packed_codes`, contiguous.
        scales: as `product` takes them, contiguous; those of int4 in the dtype of `out`.
    """
    num_rows, in_features = out.shape
    assert out.is_contiguous()
    with launch_on(weight):
        _widen[(triton.cdiv(num_rows, ROWS_OF_PROGRAM), triton.cdiv(in_features, BLOCK.value))](
            out,
            weight,
            pairs_of(scales),
            num_rows,
            IN_FEATURES=in_features,
            SCALED=scaled_of(weight, scales, out, num_rows),
            ROW_TILE=ROWS_OF_PROGRAM,
        )


def scaled_of(weight: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor, out_features: int) -> int:
    """Check a product's weight, and return `ProductForm.SCALED`."""
    assert weight.is_contiguous()
    if scales is not None and is_four_bits(scales):
        return -inputs_of_scale(weight, scales, out_features, rows.shape[1], rows.dtype)
    if scales is not None:
        return rows_of_scale(weight, scales, out_features, rows.shape[1])
    assert rows.dtype == weight.dtype
    assert_rows_of(weight, out_features, rows.shape[1])
    return 0
