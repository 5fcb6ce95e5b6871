"""The paged KV cache: memory in pages, and the cache slot of each position.

Two pages are reserved. The null page is never written, so reads from it return zeros. A backend that gathers keys reads
positions past the end of a sequence from it, which keeps stale or poisoned rows out of the arithmetic. The scratch page
takes writes whose values affect no output: those of padded rows, and of positions past the end of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.core.recurrent_cache import RecurrentCache

NULL_PAGE = 0
SCRATCH_PAGE = 1
NUM_RESERVED_PAGES = 2


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache rows of one layer.

    Attributes:
        kv: keys and values [num_pages * page_size, 2, num_kv_heads, head_dim], or rows of latent attention
            [num_pages * page_size, row_width].
        powers: [num_pages * page_size, num_kv_heads, 2] of keys and values in e4m3
            (`spec_kernels.narrow_kv_reference`); None for those in the cache's dtype.
    """

    kv: torch.Tensor
    powers: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CacheRow:
    """The contents of a layer's cache for one token.

    Attributes:
        shape: (2, num_kv_heads, head_dim) for keys and values, (row_width,) for latent rows.
        owner: the layer whose rows this layer reads instead of its own; None if it has its own.
    """

    shape: tuple[int, ...]
    owner: int | None = None


class PagedKVCache:
    """Cache rows of several layers, addressed by cache slot = page * page_size + offset. All layers share a page table.

    Attributes:
        dtype: of queries, and of rows that are not narrow.
        is_narrow: whether keys and values are in e4m3.
        tensors: [layers, num_pages * page_size, *shape], one tensor for all layers whose rows have the same shape.
            Narrow rows are bytes here, and their powers follow them.
        layers: a `LayerCache` for each layer, a view of `tensors`. A layer that reads another layer's rows has that
            layer's cache. A layer with a state has a `RecurrentCache` instead.
        recurrent: all `RecurrentCache`s, which are indexed by request slot and have no pages.
    """

    def __init__(
        self,
        rows: Sequence[CacheRow | None],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        recurrent: Mapping[int, RecurrentCache] | None = None,
        is_narrow: bool = False,
    ) -> None:
        """`rows`: the cache rows of each layer; None for layers whose caches are in `recurrent`."""
        by_layer = recurrent or {}
        self.recurrent = tuple(by_layer.values())
        self.num_pages = num_pages
        self.dtype = dtype
        self.is_narrow = is_narrow
        self.device = device
        owned: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            if row is not None and row.owner is None:
                owned.setdefault(row.shape, []).append(index)
        views: dict[int, Any] = dict(by_layer)
        self.tensors: tuple[torch.Tensor, ...] = ()
        for shape, indices in owned.items():
            size = len(indices), num_pages * page_size
            if is_narrow:
                kv = torch.zeros((*size, *shape), dtype=torch.uint8, device=device)
                powers = torch.zeros((*size, shape[1], 2), dtype=torch.bfloat16, device=device)
                self.tensors += kv, powers
                made = map(LayerCache, kv.view(torch.float8_e4m3fn), powers)
            else:
                self.tensors += (torch.zeros((*size, *shape), dtype=dtype, device=device),)
                made = map(LayerCache, self.tensors[-1])
            views |= zip(indices, made, strict=True)
        self.layers = tuple(
            views[index if row is None or row.owner is None else row.owner] for index, row in enumerate(rows)
        )

    @property
    def kv(self) -> torch.Tensor:
        """The rows of all layers that own rows [layers, num_pages * page_size, *shape]; their shapes must agree."""
        (tensor,) = self.tensors
        return tensor


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
