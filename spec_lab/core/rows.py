"""Gathers rows of a table on the device."""

from __future__ import annotations

import torch


def rows_at(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return exactly table[indices] for `indices` [count].

    On a GPU it avoids `index_select`, whose kernel for up to 16 rows (torch 2.11) copies them one by one. That takes 10
    us for 16 rows of 4096; other gathers take 2 us.
    """
    return table[indices] if table.is_cuda else table.index_select(0, indices)
