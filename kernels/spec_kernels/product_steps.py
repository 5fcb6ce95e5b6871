"""Programs of a product share what is here: the steps of their loop over the inputs, and the sum of a tile's splits."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.block_fp8 import BLOCK, load_scale, multiplier, widened
from spec_kernels.early import wait_for_inputs


@triton.jit
def load_weight(
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    inputs: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tensor:
    """Load a tile of a weight [columns, inputs], which is read once: it need not stay in L2."""
    at = weight_ptr + columns.to(tl.int64)[:, None] * IN_FEATURES + inputs[None, :]
    if WHOLE_TILES:
        weight = tl.load(at, eviction_policy="evict_first")
    else:
        inside = (columns < out_features)[:, None] & (inputs < IN_FEATURES)[None, :]
        weight = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return weight


@triton.jit
def load_rows(
    rows_ptr: tl.tensor,
    row: tl.tensor,
    inputs: tl.tensor,
    num_rows: tl.tensor,
    rows_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tensor:
    """Load a tile of the rows [row, inputs], zeros past the last one."""
    at = rows_ptr + row[:, None] * rows_stride + inputs[None, :]
    if WHOLE_TILES:
        rows = tl.load(at, mask=(row < num_rows)[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=(row < num_rows)[:, None] & (inputs < IN_FEATURES)[None, :], other=0.0)
    return rows


@triton.jit
def load_norm(norm_ptr: tl.tensor, inputs: tl.tensor, IN_FEATURES: tl.constexpr) -> tl.tensor:
    """Load some of a norm's weights, which multiply the rows; what the norm divides by is known when all inputs have
    been seen. They are asked for a step before their use: the compiler does that for operands of products alone."""
    return tl.load(norm_ptr + inputs, mask=inputs < IN_FEATURES, other=0.0)


@triton.jit
def load_weights(
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tuple:
    """Load the tiles of some steps, each as `load_weight` does."""
    inputs = first + tl.arange(0, DEPTH)
    tiles = (load_weight(weight_ptr, columns, inputs, out_features, IN_FEATURES, WHOLE_TILES),)
    for step in tl.static_range(1, STEPS):
        tiles += (load_weight(weight_ptr, columns, inputs + step * DEPTH, out_features, IN_FEATURES, WHOLE_TILES),)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_steps(
    rows_ptr: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    rows_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
) -> tl.tuple:
    """Load the rows of some steps, each as `load_rows` does."""
    inputs = first + tl.arange(0, DEPTH)
    tiles = (load_rows(rows_ptr, row, inputs, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES),)
    for step in tl.static_range(1, STEPS):
        tiles += (load_rows(rows_ptr, row, inputs + step * DEPTH, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES),)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_norms(
    norm_ptr: tl.tensor, first: tl.tensor, IN_FEATURES: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr
) -> tl.tuple:
    """Load the norm's weights of some steps, each as `load_norm` does."""
    inputs = first + tl.arange(0, DEPTH)
    parts = (load_norm(norm_ptr, inputs, IN_FEATURES),)
    for step in tl.static_range(1, STEPS):
        parts += (load_norm(norm_ptr, inputs + step * DEPTH, IN_FEATURES),)  # type: ignore[assignment]
    return parts


@triton.jit
def multiply(rows: tl.tensor, weight: tl.tensor, sums: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    """Add the product of two tiles to float32 sums [rows, columns], or turned ones. float32 is exact (no TF32)."""
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
    """Add to `sums` the product of rows with the rows `first + columns` of a weight, in a step of inputs.

    A step of a weight in e4m3 is a block, whose sums are scaled before they join the others.
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
            *(scales_ptr, first, columns, block, out_features),
            IN_FEATURES=IN_FEATURES,
            SCALE_ROWS=SCALE_ROWS,
            COLUMN_TILE=COLUMN_TILE,
            WHOLE_TILES=WHOLE_TILES,
            TURNED=TURNED,
        )
        sums += of_block * multiplier(rows.dtype) * scale
    return sums


@triton.jit
def in_groups(tile: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """Cut the inputs of a tile [rows, inputs] into as many groups: [groups, rows, inputs / groups]."""
    return tl.permute(tl.reshape(tile, (tile.shape[0], GROUPS, tile.shape[1] // GROUPS)), (1, 0, 2))


@triton.jit
def multiply_groups(rows: tl.tensor, weight: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """Add the product of groups [groups, rows, inputs] with those of a weight [columns, inputs] to float32 sums [groups,
    rows, columns]. Each warp has a group: its steps wait for one another, and are a quarter of the product's."""
    groups = tl.permute(in_groups(weight, rows.shape[0]), (0, 2, 1))
    return tl.dot(rows, groups, sums, input_precision="ieee")


@triton.jit
def sums_at_once(
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    rows_stride: tl.tensor,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    REST: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return what `tile_sums` returns, of a small weight: all inputs of a program's outputs are asked for before it waits,
    DEPTH of them and the REST, and its warps share them."""
    row = tl.arange(0, ROW_TILE)
    first = tl.arange(0, DEPTH)
    weight = load_weight(weight_ptr, column, first, out_features, IN_FEATURES, WHOLE_TILES)
    up_ptr = weight_ptr + out_features * IN_FEATURES
    if GATED:
        up_weight = load_weight(up_ptr, column, first, out_features, IN_FEATURES, WHOLE_TILES)
    if NORMED:
        norm = load_norm(norm_ptr, first, IN_FEATURES)
    if REST > 0:
        last = DEPTH + tl.arange(0, REST)
        last_weight = load_weight(weight_ptr, column, last, out_features, IN_FEATURES, WHOLE_TILES)
        if GATED:
            last_up_weight = load_weight(up_ptr, column, last, out_features, IN_FEATURES, WHOLE_TILES)
        if NORMED:
            last_norm = load_norm(norm_ptr, last, IN_FEATURES)
    wait_for_inputs(EARLY)
    sums = tl.zeros((GROUPS, ROW_TILE, column.shape[0]), tl.float32)
    up_sums = tl.zeros((GROUPS, ROW_TILE, column.shape[0]), tl.float32)
    square_sum = tl.zeros((ROW_TILE,), tl.float32)
    rows = load_rows(rows_ptr, row, first, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES)
    if REST > 0:
        last_rows = load_rows(rows_ptr, row, last, num_rows, rows_stride, IN_FEATURES, WHOLE_TILES)
    if NORMED:
        wide = rows.to(tl.float32)
        square_sum = tl.sum(wide * wide, 1)
        rows = (wide * norm[None, :]).to(rows.dtype)
        if REST > 0:
            last_wide = last_rows.to(tl.float32)
            square_sum += tl.sum(last_wide * last_wide, 1)
            last_rows = (last_wide * last_norm[None, :]).to(rows.dtype)
    groups = in_groups(rows, GROUPS)
    sums = multiply_groups(groups, weight, sums)
    if GATED:
        up_sums = multiply_groups(groups, up_weight, up_sums)
    if REST > 0:
        last_groups = in_groups(last_rows, GROUPS)
        sums = multiply_groups(last_groups, last_weight, sums)
        if GATED:
            up_sums = multiply_groups(last_groups, last_up_weight, up_sums)
    return tl.sum(sums, 0), tl.sum(up_sums, 0), square_sum


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
    """Return what `tile_sums` returns, of one split of the inputs, step by step; of the split that ends last what all of
    them have, added up in their order. It waits AHEAD with its part of the weight loaded."""
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
        # Weights are written by no kernel: they are on their way while the kernel in front still runs.
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
                *(sums, rows, weight_ptr, scales_ptr, tile * 0, column, first_input, out_features),
                IN_FEATURES=IN_FEATURES,
                COLUMN_TILE=COLUMN_TILE,
                DEPTH=DEPTH,
                SCALE_ROWS=SCALE_ROWS,
                WHOLE_TILES=WHOLE_TILES,
                TURNED=TURNED,
            )
            if GATED:
                up_sums = add_product(
                    *(up_sums, rows, weight_ptr, scales_ptr, out_features, column, first_input, out_features),
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
        tl.debug_barrier()  # all threads have stored before one of them says so
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
    """Multiply a tile of outputs [rows, column]: by the warps of one program, where there are GROUPS, else by that of each
    split of the inputs. It waits as `early.py` says.

    Returns the sums, those of the other half of the outputs where gated, the sum of each row's squares where normed,
    and whether this program has all of them.
    """
    if GROUPS > 0:
        sums, up_sums, square_sum = sums_at_once(
            *(rows_ptr, weight_ptr, norm_ptr, column, num_rows, out_features, rows_stride),
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
            *(rows_ptr, weight_ptr, scales_ptr, norm_ptr, partial_ptr, arrivals_ptr),
            *(column, num_rows, out_features, rows_stride),
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
