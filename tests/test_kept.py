"""Rows that a layer keeps are gathered as they are."""

from __future__ import annotations

import pytest
import torch

from spec_lab.core.rows import rows_at
from tests.graph_lab import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((40, 24), torch.bfloat16), ((40,), torch.int64), ((40, 3, 5), torch.float32)]
)
@pytest.mark.parametrize("count", [0, 1, 16, 33])
def test_rows_are_gathered_as_they_are(device: str, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    """Also twice the same one, and from a view with a stride."""
    table = (torch.randn(2 * shape[0], *shape[1:]) * 100).to(dtype)[::2].to(device)
    indices = (torch.arange(count) * 7 % 13).to(device)
    rows = rows_at(table, indices)
    assert rows.is_contiguous() and rows.shape == (count, *shape[1:])
    assert rows.cpu().tolist() == [table[index].cpu().tolist() for index in indices.tolist()]
