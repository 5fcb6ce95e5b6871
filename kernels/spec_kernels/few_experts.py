"""Routed experts, a shared expert and the residual for up to 16 rows, in one launch; for a single row, in two.

Nothing is sorted. Each program belongs to the shared expert, or to a pair of a row and an expert. In a pair it looks at
the choices of all rows, and computes the expert if its row is the first that chose it. Tiles have a place for each row,
so no list of an expert's rows is needed, and a row's bits do not depend on other rows.

Sources: the fused MoE kernels of vLLM and SGLang, which also treat the shared expert as another routed one. As in
`product.py`, the last program to finish computes the sum.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from spec_kernels.early import placed, wait_for_inputs
from spec_kernels.expert_tiles import MAX_INVARIANT_ROWS, choose_expert_tiles
from spec_kernels.experts import scaled_of_experts
from spec_kernels.few_experts_steps import (
    Tile,
    add_terms_of_tile,
    down_of_tile,
    gate_up_of_tile,
    rows_of_slot,
    wait_until_ready,
)
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on

_MIN_COLUMNS = 32
_ONE_LAUNCH_ROWS = 2
"""From this number of rows on, one launch is faster on an H200, since downs begin while gates and ups of other experts
are still read. A row has the same bits with one launch and with two."""


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _few_experts(
    out_ptr: tl.tensor,
    terms_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    down_ptr: tl.tensor,
    shared_gate_up_ptr: tl.tensor,
    shared_down_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    expert_ids_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_slots: tl.tensor,
    row_stride: tl.tensor,
    residual_stride: tl.tensor,
    ROW_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOICE_TILE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    INNER_COLUMNS: tl.constexpr,
    INNER_CHANNELS: tl.constexpr,
    INNER_STAGES: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GATE_UP: tl.constexpr,
    HAS_DOWN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Computes gates and ups in the first programs, and downs in later ones, which wait for the gates and ups of their
    expert. The last program to finish in a tile of outputs adds the terms of all rows. A launch may contain only one
    half.

    In practice GPUs start programs in order, so a waiting program does not block those it waits for. There are counters
    for each tile of the outputs, for the finished tiles, and for each expert's finished tiles of gates and ups.
    """
    wait_for_inputs(EARLY)
    INNER_TILES: tl.constexpr = (INNER + INNER_COLUMNS - 1) // INNER_COLUMNS
    NUM_TILES: tl.constexpr = (HIDDEN + COLUMN_TILE - 1) // COLUMN_TILE
    program = tl.program_id(0)
    num_first = INNER_TILES * num_slots if HAS_GATE_UP else 0
    is_first = program < num_first
    place = tl.where(is_first, program, program - num_first)
    slot = place // tl.where(is_first, INNER_TILES, NUM_TILES)
    tile = place % tl.where(is_first, INNER_TILES, NUM_TILES)
    expert, is_row, pairs, is_own = rows_of_slot(expert_ids_ptr, slot, num_rows, ROW_TILE, NUM_CHOSEN, CHOICE_TILE)
    num_pairs = num_rows * NUM_CHOSEN
    is_shared = slot == num_pairs
    finished_ptr = arrivals_ptr + NUM_TILES
    ready_ptr = finished_ptr + 1
    own_ready_ptr = ready_ptr + tl.where(is_shared, NUM_EXPERTS, expert)
    # The branches on HAS_GATE_UP and HAS_DOWN are taken at compile time.
    if is_first:
        if HAS_GATE_UP:  # noqa: SIM102
            if is_own:
                gate_up_of_tile(
                    inner_ptr,
                    rows_ptr,
                    tl.where(is_shared, shared_gate_up_ptr, gate_up_ptr + expert * (2 * INNER * HIDDEN)),
                    tile,
                    is_row,
                    pairs,
                    row_stride,
                    Tile(ROW_TILE, HIDDEN, INNER, INNER_COLUMNS, INNER_CHANNELS, INNER_STAGES),
                    IS_GELU,
                )
                if HAS_DOWN:
                    tl.debug_barrier()  # all threads must have stored before one signals it
                    tl.atomic_add(own_ready_ptr, 1, sem="release")
    elif HAS_DOWN:
        columns = tile * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        is_column = (columns < HIDDEN) | (HIDDEN % COLUMN_TILE == 0)
        if is_own:
            if HAS_GATE_UP:
                wait_until_ready(own_ready_ptr, INNER_TILES)
            down_of_tile(
                terms_ptr,
                inner_ptr,
                tl.where(is_shared, shared_down_ptr, down_ptr + expert * (INNER * HIDDEN)),
                routing_weights_ptr,
                columns,
                is_column,
                is_row,
                pairs,
                num_pairs,
                Tile(ROW_TILE, HIDDEN, INNER, COLUMN_TILE, CHANNEL_TILE, STAGES),
            )
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == num_slots - 1:
            tl.store(arrivals_ptr + tile, 0)
            add_terms_of_tile(
                out_ptr,
                terms_ptr,
                residual_ptr,
                columns,
                is_column,
                num_rows,
                residual_stride,
                ROW_TILE,
                NUM_CHOSEN,
                HIDDEN,
                COLUMN_TILE,
                HAS_SHARED,
                HAS_RESIDUAL,
            )
            # No program waits any more once all tiles are done.
            if HAS_GATE_UP:  # noqa: SIM102
                if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == NUM_TILES - 1:
                    tl.store(finished_ptr, 0)
                    experts = tl.arange(0, EXPERT_TILE)
                    tl.store(ready_ptr + experts, 0, mask=experts <= NUM_EXPERTS)


@operator("few_experts", mutates_args=("arrivals",))
def few_experts(
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
) -> torch.Tensor:
    """Compute the weighted sum of experts, plus shared expert and residual, for up to 16 rows. The sum is rounded once.

    Args:
        rows: this, the arguments to `weights`, `activation`, and what is returned are as in `routed_experts`. A row's
            experts are all different.
        shared_gate_up: [2 * intermediate_size, hidden_size], contiguous: an expert of the same size that every row uses
            with weight 1; `shared_down` is [hidden_size, intermediate_size].
        residual: [rows, hidden_size] of any row stride.
        arrivals: [`num_experts_arrivals`] int32 zeros, and zero again afterwards; only kernels of one stream may share
            it.
    """
    (num_rows, hidden_size), num_chosen = rows.shape, expert_ids.shape[1]
    num_experts, _, inner_size = down.shape
    assert 0 < num_rows <= MAX_INVARIANT_ROWS and len(arrivals) >= num_experts_arrivals(hidden_size, num_experts)
    out = rows.new_empty(rows.shape)
    has_shared = _has_shared(down, shared_gate_up, shared_down)
    num_slots = num_rows * num_chosen + has_shared
    inner = rows.new_empty((num_rows * (num_chosen + has_shared), inner_size))
    scaled_of_experts(rows, inner, gate_up, down, expert_ids, weights)
    terms = rows.new_empty((len(inner), hidden_size), dtype=torch.float32)
    num_first, num_second, constants = _division(rows.element_size(), num_experts, num_chosen, hidden_size, inner_size)
    # Both halves in one launch, or a launch for each.
    launches = ((True, True),) if num_rows >= _ONE_LAUNCH_ROWS else ((True, False), (False, True))
    with launch_on(out):
        for has_gate_up, has_down in launches:
            _few_experts[((num_first * has_gate_up + num_second * has_down) * num_slots,)](
                out,
                terms,
                inner,
                rows,
                gate_up,
                down,
                gate_up if shared_gate_up is None else shared_gate_up,
                down if shared_down is None else shared_down,
                out if residual is None else residual,
                weights,
                expert_ids,
                arrivals,
                num_rows,
                num_slots,
                rows.stride(0),
                0 if residual is None else residual.stride(0),
                IS_GELU=activation == "gelu_tanh",
                HAS_SHARED=has_shared,
                HAS_RESIDUAL=residual is not None,
                HAS_GATE_UP=has_gate_up,
                HAS_DOWN=has_down,
                # A launch of one half is slower if it starts early, with GLM-4.7-Flash's experts (docs/log/moe.md).
                **placed(has_gate_up and has_down),
                **constants,
            )
    return out


@cache
def _division(
    element_size: int, num_experts: int, num_chosen: int, hidden_size: int, inner_size: int
) -> tuple[int, int, dict[str, int]]:
    """Return the numbers of tiles of an expert's inner channels and of its outputs, and compile-time constants. They
    are kept, since every layer asks for them."""
    tiles = choose_expert_tiles(MAX_INVARIANT_ROWS, 1, element_size)
    assert tiles.down.columns >= _MIN_COLUMNS
    constants = {
        "ROW_TILE": MAX_INVARIANT_ROWS,
        "NUM_CHOSEN": num_chosen,
        "CHOICE_TILE": triton.next_power_of_2(num_chosen),
        "NUM_EXPERTS": num_experts,
        "EXPERT_TILE": triton.next_power_of_2(num_experts + 1),
        "HIDDEN": hidden_size,
        "INNER": inner_size,
        "INNER_COLUMNS": tiles.gate_up.columns,
        "INNER_CHANNELS": tiles.gate_up.channels,
        "INNER_STAGES": tiles.gate_up.num_stages,
        "COLUMN_TILE": tiles.down.columns,
        "CHANNEL_TILE": tiles.down.channels,
        "STAGES": tiles.down.num_stages,
        "num_warps": tiles.gate_up.num_warps,
    }
    return triton.cdiv(inner_size, tiles.gate_up.columns), triton.cdiv(hidden_size, tiles.down.columns), constants


def _has_shared(down: torch.Tensor, shared_gate_up: torch.Tensor | None, shared_down: torch.Tensor | None) -> bool:
    """Return whether there is a shared expert, and check its weights."""
    _, hidden_size, inner_size = down.shape
    assert (shared_down is None) == (shared_gate_up is None)
    for tensor, shape in ((shared_gate_up, (2 * inner_size, hidden_size)), (shared_down, (hidden_size, inner_size))):
        if tensor is not None:
            assert_rows_of(tensor, *shape)
            assert tensor.is_contiguous()
    return shared_down is not None


def num_experts_arrivals(hidden_size: int, num_experts: int) -> int:
    """Return the number of counters needed: for tiles of the outputs, for finished tiles, and for each expert,
    including the shared one."""
    return triton.cdiv(hidden_size, _MIN_COLUMNS) + 1 + num_experts + 1
