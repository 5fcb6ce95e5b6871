"""Routed experts (mixture of experts) for any number of rows. Up to 16 rows, runs use `few_experts` instead, except for
experts that are narrow or clamped.

Pairs of a row and a chosen expert are sorted by expert on the device. A program takes a tile of one expert's pairs and
columns, and finds its pairs by itself. So nothing synchronises with the host, and the size of no buffer depends on the
choices. A row's terms are added in the order in which its router chose the experts.

Sources: the fused MoE kernels of vLLM and SGLang for the product of sorted pairs.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_kernels.block_fp8 import BLOCK
from spec_kernels.expert_tiles import choose_expert_tiles
from spec_kernels.four_bits import four_bits_widened
from spec_kernels.four_bits_reference import pairs_of
from spec_kernels.gate import activate, gated_within
from spec_kernels.operators import operator
from spec_kernels.product_steps import multiply
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.widen import scaled_of

_PAIRS_AT_ONCE = 1024
_CHANNELS_AT_ONCE = 512
_NO_EXPERT = 1 << 30
_LEAST_HEIGHT = tl.constexpr(64)
"""The number of rows of the left operand on Hopper's tensor cores. If a tile has fewer pairs, the weight is on the
left."""

_ROWS_OF_EXACT_TERMS = 256
"""With more rows than this, a pair's term is rounded to the rows' dtype before the sum. In bfloat16 this halves its
bytes."""


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    num_pairs: tl.tensor,
    PAIR_TILE: tl.constexpr,
    NO_EXPERT: tl.constexpr,
) -> None:
    """Lists the pairs of one expert in ascending order, after those of all lower experts. One additional program writes
    where the last list ends."""
    expert = tl.program_id(0)
    place = 0
    for first in range(0, num_pairs, PAIR_TILE):
        pairs = first + tl.arange(0, PAIR_TILE)
        chosen = tl.load(expert_ids_ptr + pairs, mask=pairs < num_pairs, other=NO_EXPERT)
        place += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, place)
    for first in range(0, num_pairs, PAIR_TILE):
        pairs = first + tl.arange(0, PAIR_TILE)
        chosen = tl.load(expert_ids_ptr + pairs, mask=pairs < num_pairs, other=NO_EXPERT)
        is_own = chosen == expert
        count = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order_ptr + place + count - 1, pairs, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def _own_pairs(
    starts_ptr: tl.tensor,
    tile: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    PAIR_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the expert of a tile of pairs, where the tile begins in the sorted order, and where that expert's pairs
    end.

    Tiles are numbered through all experts. After the last tile the returned expert is at least NUM_EXPERTS.
    """
    experts = tl.arange(0, EXPERT_TILE)
    starts = tl.load(starts_ptr + tl.minimum(experts, NUM_EXPERTS))
    ends = tl.load(starts_ptr + tl.minimum(experts + 1, NUM_EXPERTS))
    tiles = tl.cdiv(ends - starts, PAIR_TILE)
    tiles_so_far = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_so_far <= tile).to(tl.int32), 0)
    is_own = experts == expert
    first = tl.sum(tl.where(is_own, starts + (tile - (tiles_so_far - tiles)) * PAIR_TILE, 0), 0)
    return expert, first, tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit
def _weight_tile(
    weights: tl.tensor,
    scales_ptr: tl.tensor,
    first: tl.tensor,
    is_column: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Loads a tile of weights [columns, channels], whose rows begin at `first`, and widens it if it is of 4 bits."""
    if SCALED < 0:
        words, rows = weights.load([first, channel // 4]), first + tl.arange(0, is_column.shape[0])
        tile = four_bits_widened(words, scales_ptr, rows, is_column, channel // BLOCK, CHANNELS, -SCALED, DTYPE)
    else:
        tile = weights.load([first, channel])
    return tile


@triton.jit
def _product(
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    inner: tl.tensor,
    weights: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
) -> None:
    """Computes some columns of one expert for some of its pairs: if GATED activation(gate) * up of `rows`, in sorted
    order, and else its output for `inner`, times the routing weight."""
    expert, first, end = _own_pairs(starts_ptr, tl.program_id(1), NUM_EXPERTS, EXPERT_TILE, PAIR_TILE)
    if expert < NUM_EXPERTS:
        HEIGHT: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
        TURNED: tl.constexpr = PAIR_TILE < _LEAST_HEIGHT
        column = tl.program_id(0) * COLUMN_TILE
        columns = column + tl.arange(0, COLUMN_TILE)
        is_column = columns < COLUMNS
        places = first + tl.arange(0, PAIR_TILE)
        is_pair = places < end
        if GATED:
            all_channels = tl.arange(0, CHANNEL_TILE)
            sources = tl.load(order_ptr + places, mask=is_pair, other=0) // NUM_CHOSEN
            row_ptrs = rows_ptr + sources.to(tl.int64)[:, None] * row_stride + all_channels[None, :]
        sums = tl.zeros((COLUMN_TILE, PAIR_TILE) if TURNED else (PAIR_TILE, COLUMN_TILE), tl.float32)
        ups = sums
        for channel in range(0, CHANNELS, CHANNEL_TILE):
            if GATED:
                is_channel = (channel + all_channels < CHANNELS) | (CHANNELS % CHANNEL_TILE == 0)
                rows = tl.load(row_ptrs + channel, mask=is_pair[:, None] & is_channel[None, :], other=0.0)
            else:
                rows = inner.load([first, channel])  # rows of other experts among them are not stored
            place = expert * HEIGHT + column
            tile = _weight_tile(weights, scales_ptr, place, is_column, channel, CHANNELS, SCALED, rows.dtype)
            if GATED:  # both tiles are asked for at once
                place += COLUMNS
                up_tile = _weight_tile(weights, scales_ptr, place, is_column, channel, CHANNELS, SCALED, rows.dtype)
            sums = multiply(rows, tile, sums, TURNED)
            if GATED:
                ups = multiply(rows, up_tile, ups, TURNED)
        if TURNED:
            sums, ups = tl.trans(sums), tl.trans(ups)
        if IS_CLAMPED:
            bias_ptrs = bias_ptr + expert * HEIGHT + columns
            sums += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATED:
                ups += tl.load(bias_ptrs + COLUMNS, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if not GATED:
            places = tl.load(order_ptr + places, mask=is_pair, other=0)
            sums *= tl.load(routing_weights_ptr + places, mask=is_pair, other=0.0)[:, None]
        elif IS_CLAMPED:
            sums = gated_within(sums, ups, limit)
        else:
            sums = activate(sums, IS_GELU) * ups
        out_ptrs = out_ptr + places.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _add_terms(
    out_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_stride: tl.tensor,
    NUM_CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Adds a row's terms in the order in which its experts were chosen, and the residual."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    is_channel = channels < HIDDEN
    acc = tl.zeros((CHANNEL_TILE,), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        acc += tl.load(terms_ptr + (row * NUM_CHOSEN + choice) * HIDDEN + channels, mask=is_channel, other=0.0)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row * residual_stride + channels
        acc += tl.load(residual_ptrs, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + channels, acc.to(out_ptr.dtype.element_ty), mask=is_channel)


@operator("routed_experts")
def routed_experts(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None = None,
    gate_up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    """Compute the weighted sum [rows, hidden_size] of each row's experts, plus the residual if there is one.

    Args:
        rows: [rows, hidden_size] of any row stride, of the weights' dtype.
        gate_up: [experts, 2 * intermediate_size, hidden_size], contiguous: gates, then ups.
        down: [experts, hidden_size, intermediate_size], contiguous. The last size of weights of 4 bits is
            that of `packed_codes`.
        expert_ids: [rows, chosen] int64, contiguous, from 0 to experts - 1.
        weights: [rows, chosen] float32, contiguous: the factors of the experts' outputs.
        activation: that of the gates, one of `gate.ACTIVATIONS`.
        residual: [rows, hidden_size] of any row stride.
        gate_up_scales: [experts * 2 * intermediate_size, ...], those of 4 bits as in `four_bits_reference`, in the
            rows' dtype; `down_scales` likewise.
        gate_up_bias: [experts, 2 * intermediate_size], contiguous, given with a `limit`; `down_bias` is [experts,
            hidden_size].
        limit: with it, gates and ups are clamped as in `gate.gated_within`, instead of the activation.
    """
    (num_rows, hidden_size), (num_experts, height, _) = rows.shape, gate_up.shape
    num_chosen, num_pairs, inner_size = expert_ids.shape[1], expert_ids.numel(), height // 2
    inner = rows.new_empty((num_pairs, inner_size))
    assert (limit is None) == (gate_up_bias is None) == (down_bias is None)
    assert (gate_up_scales is None) == (down_scales is None)
    scaled = scaled_of_experts(rows, inner, gate_up, down, expert_ids, weights, gate_up_scales, down_scales)
    out = rows.new_empty(rows.shape)
    if not num_rows:
        return out
    tiles = choose_expert_tiles(num_rows, num_pairs / num_experts, rows.element_size(), down_scales is not None)
    is_exact = num_rows <= _ROWS_OF_EXACT_TERMS
    terms = rows.new_empty((num_pairs, hidden_size), dtype=torch.float32 if is_exact else rows.dtype)
    order, starts = (expert_ids.new_empty(size, dtype=torch.int32) for size in (num_pairs, num_experts + 1))
    num_tiles = num_pairs // tiles.pairs + min(num_pairs, num_experts)
    sizes = {"NUM_EXPERTS": num_experts, "EXPERT_TILE": triton.next_power_of_2(num_experts), "NUM_CHOSEN": num_chosen}
    sizes |= {"PAIR_TILE": tiles.pairs, "IS_GELU": activation == "gelu_tanh", "IS_CLAMPED": limit is not None}
    brought = TensorDescriptor.from_tensor(inner, [tiles.pairs, tiles.down.channels])
    products = (
        (inner, tiles.gate_up, gate_up, gate_up_scales, gate_up_bias, hidden_size, inner_size),
        (terms, tiles.down, down, down_scales, down_bias, inner_size, hidden_size),
    )

    with launch_on(out):
        at_once = _PAIRS_AT_ONCE if is_exact else 4 * _PAIRS_AT_ONCE
        _sort_pairs[(num_experts + 1,)](order, starts, expert_ids, num_pairs, PAIR_TILE=at_once, NO_EXPERT=_NO_EXPERT)
        for (made, tile, weight, scales, bias, channels, columns), form in zip(products, scaled, strict=True):
            _product[(triton.cdiv(columns, tile.columns), num_tiles)](
                made,
                rows,
                brought,
                tile.of(weight),
                out if scales is None else pairs_of(scales),
                out if bias is None else bias,
                weights,
                order,
                starts,
                rows.stride(0),
                limit or 0.0,
                CHANNELS=channels,
                COLUMNS=columns,
                SCALED=form,
                GATED=made is inner,
                **sizes,
                **tile.options,
            )
        _add_terms[(num_rows, triton.cdiv(hidden_size, _CHANNELS_AT_ONCE))](
            out,
            terms,
            out if residual is None else residual,
            0 if residual is None else residual.stride(0),
            NUM_CHOSEN=num_chosen,
            HIDDEN=hidden_size,
            CHANNEL_TILE=_CHANNELS_AT_ONCE,
            HAS_RESIDUAL=residual is not None,
        )
    return out


def scaled_of_experts(
    rows: torch.Tensor,
    inner: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_scales: torch.Tensor | None = None,
    down_scales: torch.Tensor | None = None,
) -> tuple[int, int]:
    """Check shapes, layouts and dtypes; return `ProductForm.SCALED` of both weights. `inner` are the inputs of
    the second."""
    (num_rows, hidden_size), num_experts = rows.shape, len(down)
    assert_rows_of(rows, num_rows, hidden_size)
    assert_rows_of(weights, *expert_ids.shape)
    assert all(tensor.is_contiguous() for tensor in (gate_up, down, expert_ids, weights))
    assert weights.dtype == torch.float32
    first = scaled_of(gate_up.flatten(0, 1), gate_up_scales, rows, num_experts * 2 * inner.shape[1])
    return first, scaled_of(down.flatten(0, 1), down_scales, inner, num_experts * hidden_size)
