"""The paged KV cache: pages, their allocator, and the table from (request slot, position) to cache slot.

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


class PageAllocator:
    """Hands out pages; a request takes all it can ever need at admission, so a running request is never preempted."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > NUM_RESERVED_PAGES
        self._free = list(range(num_pages - 1, NUM_RESERVED_PAGES - 1, -1))
        self.num_total = len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "the scheduler admits only what fits"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_total, "a page was freed twice"


class PageTable:
    """[num_slots + 1, num_columns + 1] pages of each request slot. The last row is the scratch slot of padded rows, the
    last column is always the scratch page, so that positions past the cache fall on it."""

    def __init__(self, num_slots: int, max_seq_len: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.scratch_slot = num_slots
        num_columns = -(-max_seq_len // page_size)
        self.pages = torch.full((num_slots + 1, num_columns + 1), SCRATCH_PAGE, dtype=torch.int64, device=device)

    def assign(self, slot: int, pages: list[int]) -> None:
        """Give `slot` its pages; columns beyond them point to scratch."""
        assert slot != self.scratch_slot and len(pages) < self.pages.shape[1]
        self.pages[slot].fill_(SCRATCH_PAGE)
        self.pages[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def clear(self, slot: int) -> None:
        self.pages[slot].fill_(SCRATCH_PAGE)


def cache_slots(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Cache slot of each position.

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
