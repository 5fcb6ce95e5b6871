"""Attention over stretches of keys, merged: the kernel against its reference, and against one softmax over all keys."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.merge_pieces import merge_pieces, merge_pieces_reference
from tests.kernel_lab import DTYPES, assert_near, randn

Pieces = tuple[list[torch.Tensor], list[torch.Tensor]]


def make_pieces(num_pieces: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Pieces:
    """Make pieces as libraries leave them: logarithms lie heads first."""
    pieces = [randn(*shape, seed=number, dtype=dtype) for number in range(num_pieces)]
    totals = [9 * randn(shape[1], shape[0], seed=10 + number).t() for number in range(num_pieces)]
    return pieces, totals


def merged(parts: Pieces) -> torch.Tensor:
    out = merge_pieces(*parts)
    assert_near(out, merge_pieces_reference(*parts))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_pieces", [1, 2, 5])
def test_it_equals_the_reference(num_pieces: int, dtype: torch.dtype) -> None:
    """Rows end within a tile, and channels are no power of two."""
    merged(make_pieces(num_pieces, (19, 3, 24), dtype))


def test_rows_that_saw_nothing_of_a_piece_do_not_read_it() -> None:
    pieces, totals = make_pieces(2, (17, 2, 16), torch.float32)
    totals[1][5], pieces[1][5] = float("-inf"), float("nan")
    totals[0][6] = totals[1][6] = float("-inf")
    out = merged((pieces, totals))
    assert torch.equal(out[5], pieces[0][5].flatten()) and not out[6].any()


def test_pieces_merge_to_the_attention_of_all_keys() -> None:
    queries, keys, values = (randn(rows, 2, 16, seed=rows).transpose(0, 1) for rows in (7, 40, 41))
    values = values[:, :40]
    scores = queries @ keys.transpose(1, 2)
    pieces, totals = [], []
    for stretch in (slice(0, 32), slice(32, 40)):
        pieces.append((scores[:, :, stretch].softmax(-1) @ values[:, stretch]).transpose(0, 1).contiguous())
        totals.append(scores[:, :, stretch].logsumexp(-1).t())
    assert_near(merged((pieces, totals)), (scores.softmax(-1) @ values).transpose(0, 1).flatten(1))
