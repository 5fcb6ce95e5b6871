"""Products of up to 64 rows with weights that are fixed for a run, fused with norm, activation and residual.

A decode round multiplies a few rows by a model's weights, so it takes as long as reading the weights. The small
operations between two products (norm, activation, residual) would each need a launch, which costs more than their work.
So they are fused into the products.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.early import loads_ahead, placed
from spec_kernels.four_bits_reference import is_four_bits, pairs_of, widen_reference
from spec_kernels.gate import ACTIVATIONS, activate, activate_reference
from spec_kernels.operators import operator
from spec_kernels.product_loads import Operands, ProductForm, Tiling
from spec_kernels.product_steps import tile_sums
from spec_kernels.product_tiles import launch_of, row_tile, tiles_of_product
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.widen import scaled_of


@triton.jit(do_not_specialize=["num_rows", "out_features"])
def _product(
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    multiplied_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
    multiplied_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    SCALED: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MULTIPLIED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Computes one split of one tile of outputs. The last split to finish adds all splits in order."""
    row = tl.arange(0, ROW_TILE)
    column = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_row = row < num_rows
    is_entry = is_row[:, None] & (column < out_features)[None, :]
    sums, up_sums, square_sum, is_last = tile_sums(
        Operands(rows_ptr, weight_ptr, scales_ptr, norm_ptr, partial_ptr, arrivals_ptr),
        column,
        num_rows,
        out_features,
        rows_stride,
        Tiling(IN_FEATURES, SPLITS, GROUPS, ROW_TILE, COLUMN_TILE, DEPTH, REST, STAGES, TURNED, WHOLE_TILES),
        ProductForm(SCALED, NORMED, GATED, AHEAD, EARLY),
    )
    if is_last:
        if NORMED:
            scale = tl.rsqrt(square_sum / IN_FEATURES + eps)[:, None]
            sums = sums * scale
            up_sums = up_sums * scale
        if HAS_BIAS:
            sums += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
        if GATED:
            sums = activate(sums, IS_GELU) * up_sums
        if HAS_MULTIPLIED:
            multiplied_ptrs = multiplied_ptr + row[:, None] * multiplied_stride + column[None, :]
            sums = activate(sums, IS_GELU) * tl.load(multiplied_ptrs, mask=is_entry, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + row[:, None] * residual_stride + column[None, :]
            sums += tl.load(residual_ptrs, mask=is_entry, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + row[:, None] * out_features + column[None, :]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=is_entry)


@operator("product", mutates_args=("arrivals",))
def product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    gated: bool,
    activation: str = "silu",
    multiplied: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm up to 64 rows, multiply them by a weight, and apply bias, activation and residual; the result is rounded
    once.

    Args:
        rows: [rows, in_features].
        weight: [out_features, in_features], contiguous; if gated, [2 * out_features, in_features], gates first. A
            narrow weight is as returned by `block_fp8_reference.packed`, or `four_bits_reference.packed_codes`.
        arrivals: [tiles or more] int32 zeros, and zero again afterwards; only kernels of one stream may share it.
        bias: [out_features]; not if gated.
        norm_weight: [in_features] float32, of an RMSNorm of the rows with `eps`.
        residual: [rows, out_features], added to the result.
        gated: the result is activation(gate) * up.
        activation: one of `gate.ACTIVATIONS`.
        multiplied: [rows, out_features]: the result is activation(product) * multiplied; not if gated.
        scales: for an e4m3 weight, float32 [blocks of 128 rows, blocks of 128 inputs], or [rows, blocks of 128 inputs].
            For 4 bits as in `four_bits_reference`, of the rows' dtype.
    """
    (num_rows, in_features), out_features = rows.shape, weight.shape[0] // (2 if gated else 1)
    assert not (gated and (bias is not None or multiplied is not None)) and activation in ACTIVATIONS
    assert_rows_of(rows, num_rows, in_features)
    for entries in (multiplied, residual):
        assert entries is None or (entries.shape == (num_rows, out_features) and entries.stride(1) == 1)
    out = rows.new_empty(num_rows, out_features)
    tile_rows = row_tile(num_rows)
    tiles = tiles_of_product(tile_rows, out_features, in_features, gated, weight.element_size(), scales is not None)
    launch = launch_of(tiles, tile_rows, out_features, in_features, gated)
    is_ahead = loads_ahead() and scales is None and tiles.fits_ahead(in_features, gated)
    with launch_on(rows):
        _product[launch.grid](
            out,
            rows,
            weight,
            out if scales is None else pairs_of(scales),
            out if bias is None else bias,
            out if norm_weight is None else norm_weight,
            out if multiplied is None else multiplied,
            out if residual is None else residual,
            launch.empty_partial(out, arrivals),
            arrivals,
            num_rows,
            out_features,
            rows.stride(0),
            0 if multiplied is None else multiplied.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            SCALED=scaled_of(weight, scales, rows, out_features * (2 if gated else 1)),
            NORMED=norm_weight is not None,
            GATED=gated,
            IS_GELU=activation == "gelu_tanh",
            HAS_BIAS=bias is not None,
            HAS_MULTIPLIED=multiplied is not None,
            HAS_RESIDUAL=residual is not None,
            AHEAD=is_ahead,
            **placed(is_ahead),
            **launch.constants,
        )
    return out


def product_reference(
    rows: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    gated: bool,
    activation: str = "silu",
    multiplied: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `product` does."""
    wide = rows.float()
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    if norm_weight is not None:
        wide = (wide * norm_weight).to(rows.dtype).float()
    wide_weight = torch.empty(weight.shape[0], rows.shape[1], dtype=torch.float32, device=weight.device)
    if scales is None:
        wide_weight.copy_(weight)
    else:
        narrow = rows.new_empty(wide_weight.shape) if is_four_bits(scales) else wide_weight
        widen_reference(narrow, weight, scales)
        wide_weight.copy_(narrow)
    sums = wide @ wide_weight.T
    if norm_weight is not None:
        sums = sums * scale
    if bias is not None:
        sums = sums + bias.float()
    if gated:
        gate, up = sums.chunk(2, dim=1)
        sums = activate_reference(gate, activation) * up
    if multiplied is not None:
        sums = activate_reference(sums, activation) * multiplied.float()
    return (sums if residual is None else sums + residual.float()).to(rows.dtype)
