"""The parts that several products share: the steps of the loop over the inputs, and the sum of a tile's splits."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.block_fp8 import BLOCK, load_scale, multiplier, widened
from spec_kernels.early import wait_for_inputs
from spec_kernels.product_at_once import sums_at_once
from spec_kernels.product_loads import load_norm, load_norms, load_rows, load_steps, load_weight, load_weights


@triton.jit
def multiply(rows: tl.tensor, weight: tl.tensor, sums: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    """Add the product of two tiles to float32 sums [rows, columns], or transposed if TURNED. float32 is not rounded to
    TF32."""
    if TURNED:
        sums = tl.dot(weight, tl.trans(rows), sums, input_precision="ieee")
    else:
        sums = tl.dot(rows, tl.trans(weight), sums, input_precision="ieee")
    return sums


@triton.jit
def add_product(
    sums: tl.tensor,
    rows: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    first_input: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:
    """Add to `sums` the product of rows with the weight rows `first + columns`, for one step of inputs.

    With an e4m3 weight a step is one block, whose sums are scaled before they are added.
    """
    if SCALE_ROWS == 0:
        weight_ptr += first.to(tl.int64) * IN_FEATURES
        inputs = first_input + tl.arange(0, DEPTH)
        weight = load_weight(weight_ptr, columns, inputs, out_features, IN_FEATURES, WHOLE_TILES)
        sums = multiply(rows, weight, sums, TURNED)
    else:
        WIDTH: tl.constexpr = (IN_FEATURES + BLOCK - 1) // BLOCK * (BLOCK // 2)
        block = first_input // BLOCK
        pairs = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        weight_ptr += first.to(tl.int64) * WIDTH
        weight = load_weight(weight_ptr, columns, pairs, out_features, WIDTH, WHOLE_TILES)
        of_block = multiply(rows, widened(weight, rows.dtype), tl.zeros(sums.shape, tl.float32), TURNED)
        scale = load_scale(
            scales_ptr,
            first,
            columns,
            block,
            out_features,
            IN_FEATURES=IN_FEATURES,
            SCALE_ROWS=SCALE_ROWS,
            COLUMN_TILE=COLUMN_TILE,
            WHOLE_TILES=WHOLE_TILES,
            TURNED=TURNED,
        )
        sums += of_block * multiplier(rows.dtype) * scale
    return sums


@triton.jit
def split_sums(
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Compute `tile_sums` for one split of the inputs, step by step. The last split to finish returns the sums of all
    splits, added in order. With AHEAD a program loads its whole part of the weight before it waits."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    is_entry = is_row[:, None] & (column < out_features)[None, :]
    SPLIT_DEPTH: tl.constexpr = IN_FEATURES // SPLITS
    HALVES: tl.constexpr = 2 if GATED else 1
    TILE_SIZE: tl.constexpr = ROW_TILE * COLUMN_TILE

    norm = tl.zeros((DEPTH,), tl.float32)
    STEPS: tl.constexpr = SPLIT_DEPTH // DEPTH
    if AHEAD:
        # No kernel writes weights, so they are loaded while the previous kernel still runs.
        first_input = split * SPLIT_DEPTH
        if NORMED:
            norms = load_norms(norm_ptr, first_input, IN_FEATURES, DEPTH, STEPS)
        weights = load_weights(weight_ptr, column, first_input, out_features, IN_FEATURES, DEPTH, STEPS, WHOLE_TILES)
    wait_for_inputs(EARLY)
    if NORMED and not AHEAD:
        norm = load_norm(norm_ptr, split * SPLIT_DEPTH + tl.arange(0, DEPTH), IN_FEATURES)
    sums = tl.zeros((COLUMN_TILE, ROW_TILE) if TURNED else (ROW_TILE, COLUMN_TILE), tl.float32)
    up_sums = tl.zeros((COLUMN_TILE, ROW_TILE) if TURNED else (ROW_TILE, COLUMN_TILE), tl.float32)
    squares = tl.zeros((ROW_TILE, DEPTH), tl.float32)
    if AHEAD:
        all_rows = load_steps(rows_ptr, row, first_input, num_rows, rows_stride, IN_FEATURES, DEPTH, STEPS, WHOLE_TILES)
        for step in tl.static_range(STEPS):
            rows = all_rows[step]
            if NORMED:
                wide = rows.to(tl.float32)
                squares += wide * wide
                rows = (wide * norms[step][None, :]).to(rows.dtype)
            sums = multiply(rows, weights[step], sums, TURNED)
    else:
        for start in tl.range(0, SPLIT_DEPTH, DEPTH, num_stages=STAGES):
            first_input = split * SPLIT_DEPTH + start
            inputs = first_input + tl.arange(0, DEPTH)
            rows = load_rows(rows_ptr, row, inputs, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES)
            if NORMED:
                wide = rows.to(tl.float32)
                squares += wide * wide
                rows = (wide * norm[None, :]).to(rows.dtype)
                norm = load_norm(norm_ptr, inputs + DEPTH, IN_FEATURES)
            sums = add_product(
                sums,
                rows,
                weight_ptr,
                scales_ptr,
                tile * 0,
                column,
                first_input,
                out_features,
                IN_FEATURES=IN_FEATURES,
                COLUMN_TILE=COLUMN_TILE,
                DEPTH=DEPTH,
                SCALE_ROWS=SCALE_ROWS,
                WHOLE_TILES=WHOLE_TILES,
                TURNED=TURNED,
            )
            if GATED:
                up_sums = add_product(
                    up_sums,
                    rows,
                    weight_ptr,
                    scales_ptr,
                    out_features,
                    column,
                    first_input,
                    out_features,
                    IN_FEATURES=IN_FEATURES,
                    COLUMN_TILE=COLUMN_TILE,
                    DEPTH=DEPTH,
                    SCALE_ROWS=SCALE_ROWS,
                    WHOLE_TILES=WHOLE_TILES,
                    TURNED=TURNED,
                )
    if TURNED:
        sums = tl.trans(sums)
        up_sums = tl.trans(up_sums)
    square_sum = tl.sum(squares, 1)

    is_last = True
    if SPLITS > 1:
        PART_SIZE: tl.constexpr = HALVES * TILE_SIZE + ROW_TILE
        entry = row[:, None] * COLUMN_TILE + tl.arange(0, COLUMN_TILE)[None, :]
        part_ptr = partial_ptr + (tile * SPLITS + split) * PART_SIZE
        tl.store(part_ptr + entry, sums, mask=is_entry)
        if GATED:
            tl.store(part_ptr + TILE_SIZE + entry, up_sums, mask=is_entry)
        if NORMED:
            tl.store(part_ptr + HALVES * TILE_SIZE + row, square_sum, mask=is_row)
        tl.debug_barrier()  # all threads must have stored before one signals it
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            sums = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
            up_sums = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
            square_sum = tl.zeros((ROW_TILE,), tl.float32)
            for other in tl.static_range(SPLITS):
                other_ptr = partial_ptr + (tile * SPLITS + other) * PART_SIZE
                sums += tl.load(other_ptr + entry, mask=is_entry, other=0.0, cache_modifier=".cg")
                if GATED:
                    up_ptrs = other_ptr + TILE_SIZE + entry
                    up_sums += tl.load(up_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg")
                if NORMED:
                    square_ptrs = other_ptr + HALVES * TILE_SIZE + row
                    square_sum += tl.load(square_ptrs, mask=is_row, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
    return sums, up_sums, square_sum, is_last


@triton.jit
def tile_sums(
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
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
    SCALE_ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Compute a tile of outputs [rows, column]: at once if there are GROUPS, else with a program for each split of the
    inputs. It waits for the previous kernel as described in `early.py`.

    Returns the sums; if gated, those of the other half of the outputs; if normed, the sum of each row's squares; and
    whether this program has the complete sums.
    """
    if GROUPS > 0:
        sums, up_sums, square_sum = sums_at_once(
            rows_ptr,
            weight_ptr,
            norm_ptr,
            column,
            num_rows,
            out_features,
            rows_stride,
            IN_FEATURES=IN_FEATURES,
            ROW_TILE=ROW_TILE,
            DEPTH=DEPTH,
            REST=REST,
            GROUPS=GROUPS,
            WHOLE_TILES=WHOLE_TILES,
            NORMED=NORMED,
            GATED=GATED,
            EARLY=EARLY,
        )
        has_all = True
    else:
        sums, up_sums, square_sum, has_all = split_sums(
            rows_ptr,
            weight_ptr,
            scales_ptr,
            norm_ptr,
            partial_ptr,
            arrivals_ptr,
            column,
            num_rows,
            out_features,
            rows_stride,
            IN_FEATURES=IN_FEATURES,
            SPLITS=SPLITS,
            ROW_TILE=ROW_TILE,
            COLUMN_TILE=COLUMN_TILE,
            DEPTH=DEPTH,
            STAGES=STAGES,
            TURNED=TURNED,
            WHOLE_TILES=WHOLE_TILES,
            SCALE_ROWS=SCALE_ROWS,
            NORMED=NORMED,
            GATED=GATED,
            AHEAD=AHEAD,
            EARLY=EARLY,
        )
    return sums, up_sums, square_sum, has_all
