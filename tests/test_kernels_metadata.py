"""The kernels that place rows and move one-row metadata on, against the backend of torch."""

from __future__ import annotations

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.attention.triton_backend import TritonAttention
from spec_lab.core.types import AttentionMetadata
from tests.kernel_lab import DEVICE

NUM_COLUMNS = 5


def tables(batch: int) -> torch.Tensor:
    return (torch.arange(batch * NUM_COLUMNS) * 7 % 1009).view(batch, NUM_COLUMNS).to(DEVICE)


def placed(metadata: AttentionMetadata) -> tuple[torch.Tensor, ...]:
    return metadata.positions, metadata.slot_mapping, metadata.seq_lens


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_moves_like_torch_over_page_borders_and_the_end(page_size: int) -> None:
    """More requests than one program takes; the position is clamped, the write past the end goes to the last column."""
    batch, max_positions = 130, 4 * page_size - 1
    page_table = tables(batch)
    page_table[:, -1] = 1
    lens = (torch.arange(batch) % (5 * page_size) + 1).to(DEVICE)
    backends = [kind(page_size, max_positions) for kind in (TritonAttention, TorchAttention)]
    both = [backend.build((lens - 1).unsqueeze(1), lens, page_table, max_positions) for backend in backends]
    addresses = [tensor.data_ptr() for tensor in placed(both[0])]
    for _ in range(4):
        for backend, metadata in zip(backends, both, strict=True):
            backend.advance(metadata)
        assert all(map(torch.equal, *map(placed, both)))
    positions, slot_mapping, seq_lens = placed(both[0])
    assert torch.equal(seq_lens, lens + 4) and addresses == [tensor.data_ptr() for tensor in placed(both[0])]
    assert torch.equal(positions, (lens + 3).clamp(max=max_positions - 1))
    assert (slot_mapping[lens + 3 >= 4 * page_size] // page_size == 1).all()


@pytest.mark.parametrize(("page_size", "num_queries"), [(1, 1), (3, 4), (16, 2)])
def test_rows_stand_where_torch_has_them(page_size: int, num_queries: int) -> None:
    """Positions before the beginning and past the end too, more rows than one program takes, and a length of 0."""
    batch, max_positions = 70, 4 * page_size - 1
    starts = torch.arange(batch, device=DEVICE) % (5 * page_size) - 3
    positions = starts.unsqueeze(1) + torch.arange(num_queries, device=DEVICE)
    given = positions, (starts + num_queries).clamp(min=0), tables(batch), max_positions
    got, expected = (kind(page_size, max_positions).build(*given) for kind in (TritonAttention, TorchAttention))
    assert all(map(torch.equal, placed(got), placed(expected)))
