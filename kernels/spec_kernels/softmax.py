"""Softmax in tiles, for rows that one program cannot hold. Each tile has a maximum and a sum, which consumers merge.

The probabilities of a whole row are never written.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.vocabulary import VOCAB_TILE, finite_or_zero, load_logits, merge_sums, num_tiles_of, scaled_by


@triton.jit(do_not_specialize=["num_rows"])
def _softmax_in_tiles(
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    temperature: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    VOCAB_TILE: tl.constexpr,
) -> None:
    """Reads one vocabulary tile of one row: its largest scaled logit, and the sum of exponentials relative to it."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    ids = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
    row_ptr = logits_ptr + (row // num_rows).to(tl.int64) * request_stride + row % num_rows * row_stride
    scaled = scaled_by(load_logits(row_ptr, ids, vocab_size), temperature)
    top = tl.max(scaled, 0)
    out = row * tl.num_programs(1) + tile
    tl.store(tops_ptr + out, top)
    tl.store(sums_ptr + out, tl.sum(tl.exp(scaled - finite_or_zero(top)), 0))


@triton.jit
def merge_rows(
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    num_tiles: tl.tensor,
    TILE_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Merges tiles into the largest scaled logit and the sum of exponentials of whole rows."""
    tiles = tl.arange(0, TILE_TILE)[None, :]
    is_tile = is_row[:, None] & (tiles < num_tiles)
    parts = (first_row + rows)[:, None] * num_tiles + tiles
    tops = tl.load(tops_ptr + parts, mask=is_tile, other=float("-inf"))
    sums = tl.load(sums_ptr + parts, mask=is_tile, other=0.0)
    return tl.max(tops, 1), merge_sums(sums, tops, tl.max(tops, 1, keep_dims=True), 1)


def softmax_in_tiles(tops: torch.Tensor, sums: torch.Tensor, logits: torch.Tensor, temperature: float) -> None:
    """Write the largest value and the sum of exponentials of each tile of logits / temperature.

    `logits`: [batch, rows, vocab].
    `tops` and `sums`: [batch * rows or more, tiles] float32, contiguous; the first batch * rows rows are written.
    """
    batch, num_rows, vocab_size = logits.shape
    _softmax_in_tiles[(batch * num_rows, num_tiles_of(vocab_size, VOCAB_TILE))](
        tops,
        sums,
        logits,
        temperature,
        num_rows,
        vocab_size,
        logits.stride(0),
        logits.stride(1),
        VOCAB_TILE=VOCAB_TILE,
    )
