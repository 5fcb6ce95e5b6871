"""Routed experts, a shared one beside them, and the residual, for up to 16 rows in two launches.

Nothing is sorted: a program of the grid stands for a pair of a row and an expert, looks at what all rows chose, and
does the work of its expert if its row is the first that chose it. Tiles have a place for each row, so that an expert's
rows need no list, and no bit of a row depends on those beside it.

Sources: the fused MoE kernels of vLLM and SGLang, which also have the shared expert as one more of the routed ones; the
sum by the program that ends last is that of `product.py`.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.expert_tiles import MAX_INVARIANT_ROWS, choose_expert_tiles
from spec_kernels.experts import routed_experts_reference
from spec_kernels.gate import activate
from spec_kernels.utils import assert_rows_of, launch_on

_MIN_COLUMNS = 32


@triton.jit
def _rows_of_slot(
    expert_ids_ptr: tl.tensor,
    slot: tl.tensor,
    num_rows: tl.tensor,
    ROW_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOICE_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the expert of a slot, which rows chose it, as which pair each, and whether this slot has its work.

    Behind the slots of all pairs comes that of the shared expert, which all rows choose.
    """
    rows = tl.arange(0, ROW_TILE)
    choices = tl.arange(0, CHOICE_TILE)
    places = rows[:, None] * NUM_CHOSEN + choices[None, :]
    is_there = (rows < num_rows)[:, None] & (choices < NUM_CHOSEN)[None, :]
    num_pairs = num_rows * NUM_CHOSEN
    is_shared = slot == num_pairs
    expert = tl.load(expert_ids_ptr + slot, mask=slot < num_pairs, other=0)
    is_it = is_there & (tl.load(expert_ids_ptr + places, mask=is_there, other=-1) == expert)
    is_row = tl.max(is_it.to(tl.int32), 1) > 0
    first_row = tl.min(tl.where(is_row, rows, ROW_TILE), 0)
    pairs = tl.sum(tl.where(is_it, places, 0), 1)
    is_row = tl.where(is_shared, rows < num_rows, is_row)
    pairs = tl.where(is_shared, num_pairs + rows, pairs)
    return expert, is_row, pairs, is_shared | (first_row == slot // NUM_CHOSEN)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_of_few(
    inner_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    ROW_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOICE_TILE: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    """Computes activation(gate) * up in some columns of one expert, for all rows that chose it."""
    slot = tl.program_id(1)
    expert, is_row, pairs, is_own = _rows_of_slot(expert_ids_ptr, slot, num_rows, ROW_TILE, NUM_CHOSEN, CHOICE_TILE)
    if is_own:
        columns = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        is_column = (columns < INNER) | (INNER % COLUMN_TILE == 0)
        all_channels = tl.arange(0, CHANNEL_TILE)
        weights_ptr = tl.where(slot == num_rows * NUM_CHOSEN, shared_ptr, gate_up_ptr + expert * (2 * INNER * HIDDEN))
        gate_ptrs = weights_ptr + columns[:, None] * HIDDEN + all_channels[None, :]
        row_ptrs = rows_ptr + tl.arange(0, ROW_TILE)[:, None] * row_stride + all_channels[None, :]
        gate = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
        up = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
        for channel in range(0, HIDDEN, CHANNEL_TILE):
            is_channel = ((channel + all_channels < HIDDEN) | (HIDDEN % CHANNEL_TILE == 0))[None, :]
            is_weight = is_column[:, None] & is_channel
            rows = tl.load(row_ptrs + channel, mask=is_row[:, None] & is_channel, other=0.0)
            gate_rows = tl.load(gate_ptrs + channel, mask=is_weight, other=0.0)
            up_rows = tl.load(gate_ptrs + INNER * HIDDEN + channel, mask=is_weight, other=0.0)
            gate = tl.dot(rows, tl.trans(gate_rows), gate, input_precision="ieee")
            up = tl.dot(rows, tl.trans(up_rows), up, input_precision="ieee")
        inner = activate(gate, IS_GELU) * up
        inner_ptrs = inner_ptr + pairs[:, None] * INNER + columns[None, :]
        tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _down_of_few(
    out_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    down_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    residual_stride: tl.tensor,
    ROW_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOICE_TILE: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Computes some columns of one expert's outputs times the routing weights; the program that ends last adds up the
    terms of all rows, in the order in which their experts were chosen."""
    slot = tl.program_id(1)
    expert, is_row, pairs, is_own = _rows_of_slot(expert_ids_ptr, slot, num_rows, ROW_TILE, NUM_CHOSEN, CHOICE_TILE)
    columns = tl.program_id(0) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_column = (columns < HIDDEN) | (HIDDEN % COLUMN_TILE == 0)
    num_pairs = num_rows * NUM_CHOSEN
    if is_own:
        all_channels = tl.arange(0, CHANNEL_TILE)
        weights_ptr = tl.where(slot == num_pairs, shared_ptr, down_ptr + expert * (INNER * HIDDEN))
        weight_ptrs = weights_ptr + columns[:, None] * INNER + all_channels[None, :]
        inner_ptrs = inner_ptr + pairs[:, None] * INNER + all_channels[None, :]
        acc = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
        for channel in range(0, INNER, CHANNEL_TILE):
            is_channel = ((channel + all_channels < INNER) | (INNER % CHANNEL_TILE == 0))[None, :]
            inner = tl.load(inner_ptrs + channel, mask=is_row[:, None] & is_channel, other=0.0)
            weight_rows = tl.load(weight_ptrs + channel, mask=is_column[:, None] & is_channel, other=0.0)
            acc = tl.dot(inner, tl.trans(weight_rows), acc, input_precision="ieee")
        weights = tl.load(routing_weights_ptr + pairs, mask=is_row & (pairs < num_pairs), other=0.0)
        acc *= tl.where(pairs < num_pairs, weights, 1.0)[:, None]
        term_ptrs = terms_ptr + pairs[:, None] * HIDDEN + columns[None, :]
        tl.store(term_ptrs, acc, mask=is_row[:, None] & is_column[None, :])

    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrivals_ptr + tl.program_id(0), 0)
        rows = tl.arange(0, ROW_TILE)
        is_entry = (rows < num_rows)[:, None] & is_column[None, :]
        total = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
        for choice in tl.static_range(NUM_CHOSEN):
            term_ptrs = terms_ptr + (rows * NUM_CHOSEN + choice)[:, None] * HIDDEN + columns[None, :]
            total += tl.load(term_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg")
        if HAS_SHARED:
            term_ptrs = terms_ptr + (num_pairs + rows)[:, None] * HIDDEN + columns[None, :]
            total += tl.load(term_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg")
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
            total += tl.load(residual_ptrs, mask=is_entry, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + rows[:, None] * HIDDEN + columns[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_entry)


@torch.library.custom_op("spec_kernels::few_experts", mutates_args=("out", "arrivals"))
def few_experts(
    out: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    residual: torch.Tensor | None,
    arrivals: torch.Tensor,
    activation: str,
) -> None:
    """The weighted sum of the experts of each of up to 16 rows, the shared expert and the residual, rounded once.

    Args:
        out: [rows, hidden_size], contiguous, written; `rows` to `weights`, and `activation`, as in `routed_experts`.
            A row's experts are all different.
        shared_gate_up: [2 * intermediate_size, hidden_size], contiguous: of an expert that every row goes through, of
            the others' size, with weight 1; `shared_down` is [hidden_size, intermediate_size].
        residual: [rows, hidden_size] of any row stride.
        arrivals: [`num_experts_arrivals`] int32 zeros, which it leaves zero: of one stream.
    """
    num_rows, hidden_size = rows.shape
    num_experts, _, inner_size = down.shape
    num_chosen = expert_ids.shape[1]
    assert 0 < num_rows <= MAX_INVARIANT_ROWS
    for tensor, shape in (
        *((out, (num_rows, hidden_size)), (gate_up, (num_experts, 2 * inner_size, hidden_size))),
        *((down, (num_experts, hidden_size, inner_size)), (weights, tuple(expert_ids.shape))),
        *((shared_gate_up, (2 * inner_size, hidden_size)), (shared_down, (hidden_size, inner_size))),
    ):
        if tensor is not None:
            assert_rows_of(tensor, *shape)
            assert tensor.is_contiguous()
    assert (shared_down is None) == (shared_gate_up is None) and expert_ids.is_contiguous()
    assert rows.dtype == gate_up.dtype == down.dtype and weights.dtype == torch.float32 and rows.stride(1) == 1
    has_shared = shared_down is not None
    num_slots = num_rows * num_chosen + has_shared
    num_pairs = num_rows * (num_chosen + has_shared)
    inner = rows.new_empty((num_pairs, inner_size))
    terms = torch.empty((num_pairs, hidden_size), dtype=torch.float32, device=out.device)
    tiles = choose_expert_tiles(num_rows, 1, rows.element_size())
    sizes = {
        "ROW_TILE": MAX_INVARIANT_ROWS,
        "NUM_CHOSEN": num_chosen,
        "CHOICE_TILE": triton.next_power_of_2(num_chosen),
        "HIDDEN": hidden_size,
        "INNER": inner_size,
    }
    num_tiles = triton.cdiv(hidden_size, tiles.down.columns)
    assert len(arrivals) >= num_tiles
    with launch_on(out):
        _gate_up_of_few[(triton.cdiv(inner_size, tiles.gate_up.columns), num_slots)](
            *(inner, rows, gate_up, gate_up if shared_gate_up is None else shared_gate_up, expert_ids),
            *(num_rows, rows.stride(0)),
            COLUMN_TILE=tiles.gate_up.columns,
            CHANNEL_TILE=tiles.gate_up.channels,
            IS_GELU=activation == "gelu_tanh",
            num_warps=tiles.gate_up.num_warps,
            num_stages=tiles.gate_up.num_stages,
            **sizes,
        )
        _down_of_few[(num_tiles, num_slots)](
            *(out, terms, inner, down, down if shared_down is None else shared_down),
            *(out if residual is None else residual, weights, expert_ids, arrivals),
            *(num_rows, 0 if residual is None else residual.stride(0)),
            COLUMN_TILE=tiles.down.columns,
            CHANNEL_TILE=tiles.down.channels,
            HAS_SHARED=has_shared,
            HAS_RESIDUAL=residual is not None,
            num_warps=tiles.down.num_warps,
            num_stages=tiles.down.num_stages,
            **sizes,
        )


def num_experts_arrivals(hidden_size: int) -> int:
    """Return the number of counters that experts of this width need."""
    return triton.cdiv(hidden_size, _MIN_COLUMNS)


def few_experts_reference(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Compute what `few_experts` computes, in float32: [rows, hidden_size] in the rows' dtype."""
    if shared_gate_up is not None and shared_down is not None:
        gate_up, down = (torch.cat((all_, one[None])) for all_, one in ((gate_up, shared_gate_up), (down, shared_down)))
        expert_ids = torch.cat((expert_ids, torch.full_like(expert_ids[:, :1], len(down) - 1)), dim=1)
        weights = torch.cat((weights, torch.ones_like(weights[:, :1])), dim=1)
    parts = rows.float(), gate_up.float(), down.float()
    out = routed_experts_reference(*parts, expert_ids, weights, activation)
    return (out if residual is None else out + residual.float()).to(rows.dtype)
