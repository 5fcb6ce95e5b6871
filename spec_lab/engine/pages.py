"""The page allocator and the page table: which request owns which page of the KV cache."""

from __future__ import annotations

import torch

from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, SCRATCH_PAGE


class PageAllocator:
    """Hands out pages. A request takes all pages it can ever need at admission, so it is never preempted."""

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
    """The pages of each request slot, [num_slots + 1, num_columns + 1].

    The last row is the scratch slot, for padded rows. The last column is always the scratch page, which takes writes at
    positions past the cache.
    """

    def __init__(self, num_slots: int, max_seq_len: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.scratch_slot = num_slots
        num_columns = -(-max_seq_len // page_size)
        self.pages = torch.full((num_slots + 1, num_columns + 1), SCRATCH_PAGE, dtype=torch.int64, device=device)

    def assign(self, slot: int, pages: list[int]) -> None:
        """Set the pages of `slot`; the remaining columns point to the scratch page."""
        assert slot != self.scratch_slot and len(pages) < self.pages.shape[1]
        self.pages[slot].fill_(SCRATCH_PAGE)
        self.pages[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def clear(self, slot: int) -> None:
        self.pages[slot].fill_(SCRATCH_PAGE)
