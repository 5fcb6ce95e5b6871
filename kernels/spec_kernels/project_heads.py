"""Projects up to 16 rows to queries, keys and values, rotates queries and keys, and writes the KV cache, in one launch.

The two channels of a RoPE pair are in the same tile of outputs. So the program that has their sums can rotate them, and
write keys and values to the cache. vLLM and SGLang fuse rotation and cache write (`rope_write.py`). Fusing the product
too saves one launch in each layer.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.block_fp8_reference import BLOCK_SIZE
from spec_kernels.early import placed
from spec_kernels.four_bits_reference import pairs_of
from spec_kernels.operators import operator
from spec_kernels.product_loads import Operands, ProductForm, Tiling
from spec_kernels.product_steps import tile_sums
from spec_kernels.product_tiles import INVARIANT_ROWS, launch_of, tiles_of_product
from spec_kernels.utils import assert_rows_of, assert_whole, launch_on
from spec_kernels.widen import scaled_of


@triton.jit(do_not_specialize=["num_rows"])
def _project_heads(
    queries_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    signed_sin_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    rows_stride: tl.tensor,
    cos_row_stride: tl.tensor,
    sin_row_stride: tl.tensor,
    slot_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
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
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Computes one split of a tile of channels, in which the two channels of a RoPE pair alternate.

    The last split to finish rotates the channels of queries and keys, and writes all.
    """
    NUM_QKV_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    PAIR_TILE: tl.constexpr = COLUMN_TILE // 2
    numbers = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    column = numbers // HEAD_DIM * HEAD_DIM + numbers % HEAD_DIM // 2 + numbers % 2 * HALF
    pairs = tl.program_id(0) * PAIR_TILE + tl.arange(0, PAIR_TILE)
    head = pairs // HALF
    channel = (pairs % HALF)[None, :]
    row = tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    is_pair = is_row[:, None] & (head < NUM_QKV_HEADS)[None, :]

    sums, _, square_sum, is_last = tile_sums(
        Operands(rows_ptr, weight_ptr, scales_ptr, norm_ptr, partial_ptr, arrivals_ptr),
        column,
        num_rows,
        NUM_QKV_HEADS * HEAD_DIM,
        rows_stride,
        Tiling(IN_FEATURES, SPLITS, GROUPS, ROW_TILE, COLUMN_TILE, DEPTH, REST, STAGES, TURNED, WHOLE_TILES),
        ProductForm(SCALED, NORMED, False, False, EARLY),
    )
    if is_last:
        # Loaded together with the sums of the other splits. Both halves of a head have the same angles.
        cos_ptrs = cos_ptr + (row * cos_row_stride)[:, None] + channel
        sin_ptrs = signed_sin_ptr + (row * sin_row_stride)[:, None] + channel + HALF
        cos = tl.load(cos_ptrs, mask=is_pair, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptrs, mask=is_pair, other=0.0).to(tl.float32)
        slot = tl.load(slot_mapping_ptr + row, mask=is_row, other=0)
        if NORMED:
            sums = sums * tl.rsqrt(square_sum / IN_FEATURES + eps)[:, None]
        if HAS_BIAS:
            is_column = column < NUM_QKV_HEADS * HEAD_DIM
            sums += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        projected = sums.to(queries_ptr.dtype.element_ty)
        left_in, right_in = tl.split(tl.reshape(projected, (ROW_TILE, PAIR_TILE, 2)))
        wide_left, wide_right = left_in.to(tl.float32), right_in.to(tl.float32)
        # Rounded as in `rope_write.turned`.
        left = tl.fma(wide_left, cos, wide_right * -sin)
        right = tl.fma(wide_right, cos, wide_left * sin)
        is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[None, :]
        left = tl.where(is_value, left_in, left.to(left_in.dtype))
        right = tl.where(is_value, right_in, right.to(right_in.dtype))

        is_query = (head < NUM_HEADS)[None, :]
        query_ptrs = queries_ptr + (row * (NUM_HEADS * HEAD_DIM))[:, None] + (head * HEAD_DIM)[None, :] + channel
        tl.store(query_ptrs, left, mask=is_pair & is_query)
        tl.store(query_ptrs + HALF, right, mask=is_pair & is_query)
        kv_ptrs = kv_ptr + (slot * slot_stride)[:, None] + ((head - NUM_HEADS) * HEAD_DIM)[None, :] + channel
        tl.store(kv_ptrs, left, mask=is_pair & (head >= NUM_HEADS)[None, :])
        tl.store(kv_ptrs + HALF, right, mask=is_pair & (head >= NUM_HEADS)[None, :])


@operator("project_heads", mutates_args=("kv", "arrivals"))
def project_heads(
    kv: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do `product`, then `rope_write`, for up to 16 rows of heads whose channels are all rotated. Returns the rotated
    queries [rows, num_heads, head_dim].

    Args:
        kv: [num_slots, 2, num_kv_heads, head_dim], contiguous, written.
        rows: [rows, in_features].
        weight: [(num_heads + 2 * num_kv_heads) * head_dim, in_features], contiguous: query, key, value heads. A narrow
            weight is as in `product`.
        arrivals: [tiles or more] int32 zeros, and zero again afterwards; only kernels of one stream may share it.
        bias: [(num_heads + 2 * num_kv_heads) * head_dim].
        norm_weight: [in_features] float32, of an RMSNorm of the rows with `eps`.
        cos: [rows, head_dim] of each row's position, the same in both halves.
        signed_sin: [rows, head_dim], likewise, but negated in the first half.
        slot_mapping: [rows] int64.
        scales: for a narrow weight, as in `product`; only for heads that pass `fits_scales`.
    """
    (num_rows, in_features), out_features = rows.shape, weight.shape[0]
    num_kv_heads, head_dim = kv.shape[2:]
    num_heads, is_narrow = out_features // head_dim - 2 * num_kv_heads, scales is not None
    assert num_rows <= INVARIANT_ROWS and head_dim % 2 == 0
    assert_rows_of(rows, num_rows, in_features)
    assert_whole((kv,), kv.shape[0], 2, num_kv_heads, head_dim)
    for turns in (cos, signed_sin):
        assert_rows_of(turns, num_rows, head_dim)
    assert_rows_of(slot_mapping, num_rows)
    assert kv.dtype == rows.dtype and (not is_narrow or fits_scales(head_dim))
    queries = rows.new_empty(num_rows, num_heads, head_dim)
    tiles = tiles_of_product(INVARIANT_ROWS, out_features, in_features, False, weight.element_size(), is_narrow)
    launch = launch_of(tiles, INVARIANT_ROWS, out_features, in_features, False)
    with launch_on(rows):
        _project_heads[launch.grid](
            queries,
            kv,
            rows,
            weight,
            queries if scales is None else pairs_of(scales),
            queries if bias is None else bias,
            queries if norm_weight is None else norm_weight,
            cos,
            signed_sin,
            slot_mapping,
            launch.empty_partial(rows, arrivals),
            arrivals,
            num_rows,
            rows.stride(0),
            cos.stride(0),
            signed_sin.stride(0),
            kv.stride(0),
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            SCALED=scaled_of(weight, scales, rows, out_features),
            NORMED=norm_weight is not None,
            HAS_BIAS=bias is not None,
            **placed(tiles.groups > 0),
            **launch.constants,
        )
    return queries


def fits_scales(head_dim: int) -> bool:
    """Return whether every tile of channels of heads of this size is within one block of scales."""
    return BLOCK_SIZE % head_dim == 0
