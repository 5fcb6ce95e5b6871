"""The kernel that moves one-row metadata on against its reference."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.metadata import (
    advance_metadata,
    advance_metadata_reference,
    build_metadata,
    build_metadata_reference,
)
from spec_lab.core.kv_cache import cache_slots
from tests.kernel_lab import DEVICE


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_moves_like_the_reference_over_page_borders_and_the_end(page_size: int) -> None:
    """More requests than one program takes; the position is clamped, the write past the end goes to the last column."""
    batch, num_columns, max_positions = 130, 5, 4 * page_size - 1
    page_table = (torch.arange(batch * num_columns) * 7 % 1009).view(batch, num_columns).to(DEVICE)
    page_table[:, -1] = 1
    lens = (torch.arange(batch) % (5 * page_size) + 1).to(DEVICE)
    got, expected = ([torch.full_like(lens, -1), torch.full_like(lens, -1), lens.clone()] for _ in range(2))
    addresses = [tensor.data_ptr() for tensor in got]
    for _ in range(4):
        advance_metadata(*got, page_table, page_size, max_positions)
        advance_metadata_reference(*expected, page_table, page_size, max_positions)
        assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))
    positions, slot_mapping, seq_lens = got
    assert torch.equal(seq_lens, lens + 4) and addresses == [tensor.data_ptr() for tensor in got]
    assert torch.equal(positions, (lens + 3).clamp(max=max_positions - 1))
    assert (slot_mapping[lens + 3 >= 4 * page_size] // page_size == 1).all()


@pytest.mark.parametrize(("page_size", "num_queries"), [(1, 1), (3, 4), (16, 2)])
def test_rows_stand_where_the_reference_has_them(page_size: int, num_queries: int) -> None:
    """Positions before the beginning and past the end too, more rows than one program takes, and a length of 0."""
    batch, num_columns, max_positions = 70, 5, 4 * page_size - 1
    page_table = (torch.arange(batch * num_columns) * 7 % 1009).view(batch, num_columns).to(DEVICE)
    starts = torch.arange(batch, device=DEVICE) % (5 * page_size) - 3
    positions = starts.unsqueeze(1) + torch.arange(num_queries, device=DEVICE)
    seq_lens = (starts + num_queries).clamp(min=0)
    results = []
    for function in (build_metadata, build_metadata_reference):
        outputs = [torch.full((size,), -7, device=DEVICE) for size in (positions.numel(), positions.numel(), batch)]
        function(*outputs, positions, seq_lens, page_table, page_size, max_positions)
        results.append(outputs)
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))
    assert torch.equal(results[0][1].view(batch, -1), cache_slots(page_table, positions, page_size))
