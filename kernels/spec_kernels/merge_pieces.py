"""Merges attention results for the same rows over several ranges of keys into the result over all of them.

Each piece is normalised by itself, and comes with the logarithm of its sum of exponentials (Flash-Decoding, Dao et al.
2023), as a library's kernel returns it. Unnormalised results of decoding kernels are merged in `split_merge.py` and
`latent_merge.py`.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import finite_or_zero

_ROW_TILE = 16


@triton.jit(do_not_specialize=["num_rows"])
def merge_rows(
    out_ptr: tl.tensor,
    pieces_ptr: tl.tuple,
    totals_ptr: tl.tuple,
    num_rows: tl.tensor,
    piece_row_stride: tl.tensor,
    piece_head_stride: tl.tensor,
    total_row_stride: tl.tensor,
    total_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Merges ROW_TILE rows of one head, and reads each value of a piece at most once."""
    rows = (tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    head = tl.program_id(1)
    is_row = rows < num_rows
    channels = tl.arange(0, CHANNEL_TILE)
    is_entry = is_row[:, None] & (channels < HEAD_DIM)[None, :]
    total_offsets = rows * total_row_stride + head * total_head_stride
    offsets = (rows * piece_row_stride + head * piece_head_stride)[:, None] + channels[None, :]

    largest = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    for piece in tl.static_range(len(pieces_ptr)):
        largest = tl.maximum(largest, tl.load(totals_ptr[piece] + total_offsets, mask=is_row, other=0.0))
    shift = finite_or_zero(largest)
    weights = tl.zeros((ROW_TILE,), tl.float32)
    merged = tl.zeros((ROW_TILE, CHANNEL_TILE), tl.float32)
    for piece in tl.static_range(len(pieces_ptr)):
        weight = tl.exp(tl.load(totals_ptr[piece] + total_offsets, mask=is_row, other=0.0) - shift)
        is_seen = is_entry & (weight > 0)[:, None]
        entries = tl.load(pieces_ptr[piece] + offsets, mask=is_seen, other=0.0)
        weights += weight
        merged += weight[:, None] * entries.to(tl.float32)
    out = merged / tl.where(weights > 0, weights, 1.0)[:, None]
    out_offsets = ((rows * NUM_HEADS + head) * HEAD_DIM)[:, None] + channels[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=is_entry)


@operator("merge_pieces")
def merge_pieces(pieces: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]) -> torch.Tensor:
    """Merge attention over several ranges of keys: [rows, num_heads * head_dim], zeros for rows that saw no key at all.

    Args:
        pieces: [rows, num_heads, head_dim] each, of the same strides.
        totals: [rows, num_heads] float32 each, of the same strides: the logarithms of their sums of exponentials. It is
            -inf for a row that saw no key of a piece, whose values in the piece are then ignored.
    """
    num_rows, num_heads, head_dim = pieces[0].shape
    out = pieces[0].new_empty(num_rows, num_heads * head_dim)
    for piece, total in zip(pieces, totals, strict=True):
        assert_rows_of(piece, num_rows, num_heads, head_dim)
        assert total.shape == (num_rows, num_heads) and total.dtype == torch.float32
        assert piece.stride() == pieces[0].stride() and total.stride() == totals[0].stride()
    with launch_on(out):
        merge_rows[triton.cdiv(num_rows, _ROW_TILE), num_heads](
            out,
            tuple(pieces),
            tuple(totals),
            num_rows,
            pieces[0].stride(0),
            pieces[0].stride(1),
            totals[0].stride(0),
            totals[0].stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            ROW_TILE=_ROW_TILE,
            CHANNEL_TILE=triton.next_power_of_2(head_dim),
        )
    return out


def merge_pieces_reference(pieces: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]) -> torch.Tensor:
    """Do what `merge_pieces` does."""
    weights = torch.stack(tuple(totals)).softmax(dim=0).nan_to_num(0.0).unsqueeze(-1)
    terms = torch.where(weights > 0, weights * torch.stack(tuple(pieces)).float(), 0.0)
    return terms.sum(dim=0).flatten(1).to(pieces[0].dtype)
