"""The paged KV cache as every part sees it: memory in pages, and the cache slot of a position.

Two pages are reserved. The null page is never written, so what is read from it is zero: key positions past the end of
a sequence are read from there, which keeps stale or poisoned rows out of the arithmetic. The scratch page takes writes
nobody will read: padded rows, and positions past the end of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NULL_PAGE = 0
SCRATCH_PAGE = 1
NUM_RESERVED_PAGES = 2


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer: kv [num_pages * page_size, 2, num_kv_heads, head_dim]."""

    kv: torch.Tensor


class PagedKVCache:
    """KV of several layers, addressed by cache slot = page * page_size + offset."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages * page_size, 2, num_kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = tuple(LayerCache(layer) for layer in self.kv)


def cache_slots(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Compute the cache slot of each position.

    Args:
        page_table: [batch, num_columns + 1] pages, the last column scratch.
        positions: [batch, num_queries]; positions past the last column, or negative ones, go to the scratch page.

    Returns:
        [batch, num_queries] int64 cache slots.
    """
    last_column = page_table.shape[1] - 1
    columns = torch.div(positions, page_size, rounding_mode="floor").clamp_(max=last_column)
    columns = torch.where(columns < 0, last_column, columns)
    return page_table.gather(1, columns).mul_(page_size).add_(positions.remainder(page_size))
