"""The parts that several products share: the steps of the loop over the inputs, and the sum of a tile's splits."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.block_fp8 import BLOCK, load_scale, multiplier, widened
from spec_kernels.early import wait_for_inputs
from spec_kernels.four_bits import four_bits_widened
from spec_kernels.product_at_once import sums_at_once
from spec_kernels.product_loads import (
    Operands,
    ProductForm,
    Tiling,
    load_norm,
    load_norms,
    load_rows,
    load_steps,
    load_weight,
    load_weights,
)


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
def normed(rows: tl.tensor, norm: tl.tensor, squares: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Multiply a step of rows [rows, inputs] by a norm's weights [inputs], and add the rows' squares to `squares`."""
    wide = rows.to(tl.float32)
    squares += wide * wide
    return (wide * norm[None, :]).to(rows.dtype), squares


@triton.jit
def _add_product(
    sums: tl.tensor,
    rows: tl.tensor,
    operands: Operands,
    first: tl.tensor,
    columns: tl.tensor,
    first_input: tl.tensor,
    out_features: tl.tensor,
    tiling: Tiling,
    form: ProductForm,
) -> tl.tensor:
    """Add to `sums` the product of rows with the weight rows `first + columns`, for one step of inputs.

    With a narrow weight a step is one block. In e4m3 its sums are scaled before they are added; in 4 bits its numbers
    are.
    """
    if form.SCALED == 0:
        weight_ptr = operands.weight + first.to(tl.int64) * tiling.IN_FEATURES
        inputs = first_input + tl.arange(0, tiling.DEPTH)
        weight = load_weight(weight_ptr, columns, inputs, out_features, tiling.IN_FEATURES, tiling.WHOLE_TILES)
        sums = multiply(rows, weight, sums, tiling.TURNED)
    else:
        IS_FOUR: tl.constexpr = form.SCALED < 0
        WORDS: tl.constexpr = BLOCK // 4 if IS_FOUR else BLOCK // 2
        WIDTH: tl.constexpr = (tiling.IN_FEATURES + BLOCK - 1) // BLOCK * WORDS
        block = first_input // BLOCK
        words = block * WORDS + tl.arange(0, WORDS)
        weight_ptr = operands.weight + first.to(tl.int64) * WIDTH
        weight = load_weight(weight_ptr, columns, words, out_features, WIDTH, tiling.WHOLE_TILES)
        if IS_FOUR:
            wide = four_bits_widened(
                weight,
                operands.scales,
                first + columns,
                columns < out_features,
                block,
                tiling.IN_FEATURES,
                -form.SCALED,
                rows.dtype,
            )
            sums = multiply(rows, wide, sums, tiling.TURNED)
        else:
            of_block = multiply(rows, widened(weight, rows.dtype), tl.zeros(sums.shape, tl.float32), tiling.TURNED)
            scale = load_scale(
                operands.scales,
                first,
                columns,
                block,
                out_features,
                IN_FEATURES=tiling.IN_FEATURES,
                SCALE_ROWS=form.SCALED,
                COLUMN_TILE=tiling.COLUMN_TILE,
                WHOLE_TILES=tiling.WHOLE_TILES,
                TURNED=tiling.TURNED,
            )
            sums += of_block * multiplier(rows.dtype) * scale
    return sums


@triton.jit
def sums_of_split(
    operands: Operands,
    split: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
    tiling: Tiling,
    form: ProductForm,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Compute `tile_sums` for one split of the inputs, step by step. With AHEAD it loads its whole part of the weight
    before it waits."""
    ROW_TILE: tl.constexpr = tiling.ROW_TILE
    COLUMN_TILE: tl.constexpr = tiling.COLUMN_TILE
    IN_FEATURES: tl.constexpr = tiling.IN_FEATURES
    DEPTH: tl.constexpr = tiling.DEPTH
    SPLIT_DEPTH: tl.constexpr = IN_FEATURES // tiling.SPLITS
    STEPS: tl.constexpr = SPLIT_DEPTH // DEPTH
    WHOLE: tl.constexpr = tiling.WHOLE_TILES
    row = tl.arange(0, ROW_TILE)
    if form.AHEAD:
        # No kernel writes weights, so they are loaded while the previous kernel still runs.
        first_input = split * SPLIT_DEPTH
        if form.NORMED:
            norms = load_norms(operands.norm, first_input, IN_FEATURES, DEPTH, STEPS)
        weights = load_weights(operands.weight, column, first_input, out_features, IN_FEATURES, DEPTH, STEPS, WHOLE)
    wait_for_inputs(form.EARLY)
    if form.NORMED and not form.AHEAD:
        norm = load_norm(operands.norm, split * SPLIT_DEPTH + tl.arange(0, DEPTH), IN_FEATURES)
    sums = tl.zeros((COLUMN_TILE, ROW_TILE) if tiling.TURNED else (ROW_TILE, COLUMN_TILE), tl.float32)
    up_sums = tl.zeros((COLUMN_TILE, ROW_TILE) if tiling.TURNED else (ROW_TILE, COLUMN_TILE), tl.float32)
    squares = tl.zeros((ROW_TILE, DEPTH), tl.float32)
    if form.AHEAD:
        all_rows = load_steps(operands.rows, row, first_input, num_rows, rows_stride, IN_FEATURES, DEPTH, STEPS, WHOLE)
        for step in tl.static_range(STEPS):
            rows = all_rows[step]
            if form.NORMED:
                rows, squares = normed(rows, norms[step], squares)
            sums = multiply(rows, weights[step], sums, tiling.TURNED)
    else:
        for start in tl.range(0, SPLIT_DEPTH, DEPTH, num_stages=tiling.STAGES):
            first = split * SPLIT_DEPTH + start
            inputs = first + tl.arange(0, DEPTH)
            rows = load_rows(operands.rows, row, inputs, num_rows, rows_stride, IN_FEATURES, WHOLE)
            if form.NORMED:
                rows, squares = normed(rows, norm, squares)
                norm = load_norm(operands.norm, inputs + DEPTH, IN_FEATURES)
            sums = _add_product(sums, rows, operands, split * 0, column, first, out_features, tiling, form)
            if form.GATED:
                up_sums = _add_product(up_sums, rows, operands, out_features, column, first, out_features, tiling, form)
    if tiling.TURNED:
        sums, up_sums = tl.trans(sums), tl.trans(up_sums)
    return sums, up_sums, tl.sum(squares, 1)


@triton.jit
def _add_splits(
    sums: tl.tensor,
    up_sums: tl.tensor,
    square_sum: tl.tensor,
    operands: Operands,
    split: tl.tensor,
    num_rows: tl.tensor,
    is_entry: tl.tensor,
    tiling: Tiling,
    form: ProductForm,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Store the sums of one split. The last split to finish adds those of all splits, in order."""
    ROW_TILE: tl.constexpr = tiling.ROW_TILE
    COLUMN_TILE: tl.constexpr = tiling.COLUMN_TILE
    HALVES: tl.constexpr = 2 if form.GATED else 1
    TILE_SIZE: tl.constexpr = ROW_TILE * COLUMN_TILE
    PART_SIZE: tl.constexpr = HALVES * TILE_SIZE + ROW_TILE
    tile = tl.program_id(0)
    row = tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    entry = row[:, None] * COLUMN_TILE + tl.arange(0, COLUMN_TILE)[None, :]
    part_ptr = operands.partial + (tile * tiling.SPLITS + split) * PART_SIZE
    tl.store(part_ptr + entry, sums, mask=is_entry)
    if form.GATED:
        tl.store(part_ptr + TILE_SIZE + entry, up_sums, mask=is_entry)
    if form.NORMED:
        tl.store(part_ptr + HALVES * TILE_SIZE + row, square_sum, mask=is_row)
    tl.debug_barrier()  # all threads must have stored before one signals it
    is_last = tl.atomic_add(operands.arrivals + tile, 1, sem="acq_rel") == tiling.SPLITS - 1
    if is_last:
        sums = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
        up_sums = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
        square_sum = tl.zeros((ROW_TILE,), tl.float32)
        for other in tl.static_range(tiling.SPLITS):
            other_ptr = operands.partial + (tile * tiling.SPLITS + other) * PART_SIZE
            sums += tl.load(other_ptr + entry, mask=is_entry, other=0.0, cache_modifier=".cg")
            if form.GATED:
                up_ptrs = other_ptr + TILE_SIZE + entry
                up_sums += tl.load(up_ptrs, mask=is_entry, other=0.0, cache_modifier=".cg")
            if form.NORMED:
                square_ptrs = other_ptr + HALVES * TILE_SIZE + row
                square_sum += tl.load(square_ptrs, mask=is_row, other=0.0, cache_modifier=".cg")
        tl.store(operands.arrivals + tile, 0)
    return sums, up_sums, square_sum, is_last


@triton.jit
def tile_sums(
    operands: Operands,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
    tiling: Tiling,
    form: ProductForm,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Compute a tile of outputs [rows, column]: at once if there are GROUPS, else with a program for each split of the
    inputs. It waits for the previous kernel as described in `early.py`.

    Returns the sums; if gated, those of the other half of the outputs; if normed, the sum of each row's squares; and
    whether this program has the complete sums.
    """
    has_all = True
    if tiling.GROUPS > 0:
        sums, up_sums, square_sum = sums_at_once(operands, column, num_rows, out_features, rows_stride, tiling, form)
    else:
        split = tl.program_id(1)
        is_entry = (tl.arange(0, tiling.ROW_TILE) < num_rows)[:, None] & (column < out_features)[None, :]
        sums, up_sums, square_sum = sums_of_split(
            operands, split, column, num_rows, out_features, rows_stride, tiling, form
        )
        if tiling.SPLITS > 1:
            sums, up_sums, square_sum, has_all = _add_splits(
                sums, up_sums, square_sum, operands, split, num_rows, is_entry, tiling, form
            )
    return sums, up_sums, square_sum, has_all
