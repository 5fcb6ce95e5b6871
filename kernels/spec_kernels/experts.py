"""Routed experts (mixture of experts) for a few rows: each chosen expert's weights are read once for all its rows.

Pairs of a row and an expert that it chose are sorted by expert on the device; a program takes a stretch of one expert's
columns, and finds out by itself which pairs are its own. So nothing asks the host, and every buffer has a size that
follows from the number of rows.

A pair is one row of a tensor core product whose tile has one shape for 1 to `MAX_INVARIANT_ROWS` rows, and a row's
pairs are added up in the order in which its router chose them. What stands beside a row therefore changes no bit of it.

Sources: the fused MoE kernels of vLLM and SGLang for the product of sorted pairs.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.expert_tiles import choose_expert_tiles
from spec_kernels.gate import activate, activate_reference
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_PAIRS_AT_ONCE = 1024
_CHANNELS_AT_ONCE = 512
_NO_EXPERT = 1 << 30


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    num_pairs: tl.tensor,
    PAIR_TILE: tl.constexpr,
    NO_EXPERT: tl.constexpr,
) -> None:
    """Lists the pairs of one expert in ascending order, behind those of all lower experts. One program more than there
    are experts writes where the last list ends."""
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
    order_ptr: tl.tensor, starts_ptr: tl.tensor, expert_ids_ptr: tl.tensor, slot: tl.tensor, BY_PAIR: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the expert of a slot of the grid, and where its pairs lie in the order: none where another slot has it.

    With fewer pairs than experts a slot is a pair, and the first pair of an expert has it; else a slot is an expert.
    """
    expert = slot
    if BY_PAIR:
        expert = tl.load(expert_ids_ptr + slot).to(tl.int32)
    first = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    if BY_PAIR:
        end = tl.where(tl.load(order_ptr + first) == slot, end, first)
    return expert, first, end


@triton.jit
def _gate_up(
    inner_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    row_stride: tl.tensor,
    NUM_CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    """Computes activation(gate) * up in some columns of one expert, for all pairs of it."""
    expert, first, end = _own_pairs(order_ptr, starts_ptr, expert_ids_ptr, tl.program_id(1), BY_PAIR)
    columns = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_column = (columns < INNER) | (INNER % COLUMN_TILE == 0)
    all_channels = tl.arange(0, CHANNEL_TILE)
    gate_ptrs = weights_ptr + (expert.to(tl.int64) * 2 * INNER + columns)[:, None] * HIDDEN + all_channels[None, :]
    for first_place in range(first, end, PAIR_TILE):
        places = first_place + tl.arange(0, PAIR_TILE)
        is_pair = places < end
        pairs = tl.load(order_ptr + places, mask=is_pair, other=0)
        row_ptrs = rows_ptr + (pairs // NUM_CHOSEN).to(tl.int64)[:, None] * row_stride + all_channels[None, :]
        gate = tl.zeros((PAIR_TILE, COLUMN_TILE), tl.float32)
        up = tl.zeros((PAIR_TILE, COLUMN_TILE), tl.float32)
        for channel in range(0, HIDDEN, CHANNEL_TILE):
            is_channel = ((channel + all_channels < HIDDEN) | (HIDDEN % CHANNEL_TILE == 0))[None, :]
            is_weight = is_column[:, None] & is_channel
            rows = tl.load(row_ptrs + channel, mask=is_pair[:, None] & is_channel, other=0.0)
            gate_rows = tl.load(gate_ptrs + channel, mask=is_weight, other=0.0)
            up_rows = tl.load(gate_ptrs + INNER * HIDDEN + channel, mask=is_weight, other=0.0)
            gate = tl.dot(rows, tl.trans(gate_rows), gate, input_precision="ieee")
            up = tl.dot(rows, tl.trans(up_rows), up, input_precision="ieee")
        inner = activate(gate, IS_GELU) * up
        inner_ptrs = inner_ptr + pairs.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _down(
    terms_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BY_PAIR: tl.constexpr,
) -> None:
    """Computes some columns of one expert's output times the routing weight, for all pairs of it."""
    expert, first, end = _own_pairs(order_ptr, starts_ptr, expert_ids_ptr, tl.program_id(1), BY_PAIR)
    columns = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_column = (columns < HIDDEN) | (HIDDEN % COLUMN_TILE == 0)
    all_channels = tl.arange(0, CHANNEL_TILE)
    weight_ptrs = weights_ptr + (expert.to(tl.int64) * HIDDEN + columns)[:, None] * INNER + all_channels[None, :]
    for first_place in range(first, end, PAIR_TILE):
        places = first_place + tl.arange(0, PAIR_TILE)
        is_pair = places < end
        pairs = tl.load(order_ptr + places, mask=is_pair, other=0)
        inner_ptrs = inner_ptr + pairs.to(tl.int64)[:, None] * INNER + all_channels[None, :]
        acc = tl.zeros((PAIR_TILE, COLUMN_TILE), tl.float32)
        for channel in range(0, INNER, CHANNEL_TILE):
            is_channel = ((channel + all_channels < INNER) | (INNER % CHANNEL_TILE == 0))[None, :]
            inner = tl.load(inner_ptrs + channel, mask=is_pair[:, None] & is_channel, other=0.0)
            weight_rows = tl.load(weight_ptrs + channel, mask=is_column[:, None] & is_channel, other=0.0)
            acc = tl.dot(inner, tl.trans(weight_rows), acc, input_precision="ieee")
        acc *= tl.load(routing_weights_ptr + pairs, mask=is_pair, other=0.0)[:, None]
        term_ptrs = terms_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        tl.store(term_ptrs, acc, mask=is_pair[:, None] & is_column[None, :])


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
    """Adds up a row's terms, in the order in which its experts were chosen, and the residual."""
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


@operator("routed_experts", mutates_args=("out",))
def routed_experts(
    out: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None = None,
) -> None:
    """The weighted sum of each row's experts, and the residual where there is one.

    Args:
        out: [rows, hidden_size], contiguous, written.
        rows: [rows, hidden_size] of any row stride, of the weights' dtype.
        gate_up: [experts, 2 * intermediate_size, hidden_size], contiguous: gates, then ups.
        down: [experts, hidden_size, intermediate_size], contiguous.
        expert_ids: [rows, chosen] int64, contiguous, from 0 to experts - 1.
        weights: [rows, chosen] float32, contiguous: what the experts' outputs are multiplied by.
        activation: of the gates, one of `gate.ACTIVATIONS`.
        residual: [rows, hidden_size] of any row stride.
    """
    num_rows, hidden_size = rows.shape
    num_experts, _, inner_size = down.shape
    num_chosen = expert_ids.shape[1]
    num_pairs = num_rows * num_chosen
    _assert_shapes(out, rows, gate_up, down, expert_ids, weights)
    tiles = choose_expert_tiles(num_rows, num_pairs / num_experts, rows.element_size())
    by_pair = num_pairs <= num_experts
    num_slots = num_pairs if by_pair else num_experts
    order, starts = (torch.empty(size, dtype=torch.int32, device=out.device) for size in (num_pairs, num_experts + 1))
    inner = rows.new_empty((num_pairs, inner_size))
    terms = torch.empty((num_pairs, hidden_size), dtype=torch.float32, device=out.device)
    pairs = (order, starts, expert_ids)

    with launch_on(out):
        _sort_pairs[(num_experts + 1,)](
            order, starts, expert_ids, num_pairs, PAIR_TILE=_PAIRS_AT_ONCE, NO_EXPERT=_NO_EXPERT
        )
        _gate_up[(triton.cdiv(inner_size, tiles.gate_up.columns), num_slots)](
            *(inner, rows, gate_up, *pairs, rows.stride(0)),
            NUM_CHOSEN=num_chosen,
            HIDDEN=hidden_size,
            INNER=inner_size,
            PAIR_TILE=tiles.pairs,
            COLUMN_TILE=tiles.gate_up.columns,
            CHANNEL_TILE=tiles.gate_up.channels,
            BY_PAIR=by_pair,
            IS_GELU=activation == "gelu_tanh",
            num_warps=tiles.gate_up.num_warps,
            num_stages=tiles.gate_up.num_stages,
        )
        _down[(triton.cdiv(hidden_size, tiles.down.columns), num_slots)](
            *(terms, inner, down, weights, *pairs),
            HIDDEN=hidden_size,
            INNER=inner_size,
            PAIR_TILE=tiles.pairs,
            COLUMN_TILE=tiles.down.columns,
            CHANNEL_TILE=tiles.down.channels,
            BY_PAIR=by_pair,
            num_warps=tiles.down.num_warps,
            num_stages=tiles.down.num_stages,
        )
        _add_terms[(num_rows, triton.cdiv(hidden_size, _CHANNELS_AT_ONCE))](
            *(out, terms, out if residual is None else residual, 0 if residual is None else residual.stride(0)),
            NUM_CHOSEN=num_chosen,
            HIDDEN=hidden_size,
            CHANNEL_TILE=_CHANNELS_AT_ONCE,
            HAS_RESIDUAL=residual is not None,
        )


def _assert_shapes(
    out: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Assert what the kernels take for granted."""
    num_rows, hidden_size = rows.shape
    num_experts, _, inner_size = down.shape
    assert_rows_of(out, num_rows, hidden_size)
    assert_rows_of(rows, num_rows, hidden_size)
    assert_rows_of(gate_up, num_experts, 2 * inner_size, hidden_size)
    assert_rows_of(down, num_experts, hidden_size, inner_size)
    assert_rows_of(weights, *expert_ids.shape)
    assert all(tensor.is_contiguous() for tensor in (out, gate_up, down, expert_ids, weights))
    assert rows.dtype == gate_up.dtype == down.dtype and weights.dtype == torch.float32


def routed_experts_reference(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Compute what `routed_experts` computes, in float32, an expert after the other: [rows, hidden_size] in the rows'
    dtype."""
    out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in expert_ids.unique().tolist():
        chose, choice = torch.where(expert_ids == expert)
        gate, up = (rows[chose].float() @ gate_up[expert].float().t()).chunk(2, dim=-1)
        product = (activate_reference(gate, activation) * up) @ down[expert].float().t()
        out.index_add_(0, chose, product * weights[chose, choice].unsqueeze(-1))
    return out.to(rows.dtype)
