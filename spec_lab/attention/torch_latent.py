"""Latent attention in torch: all heads read the same cache row of a token."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.latent_protocols import LatentKernels
from spec_lab.core.types import AttentionMetadata


class KeyReader(Protocol):
    """Returns where the keys of a forward are, and which of them each row sees."""

    def read_slots(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the slot of each key position, [batch, max_seq_len]."""
        ...

    def mask(self, metadata: AttentionMetadata, window: int | None, dtype: torch.dtype, group: int) -> torch.Tensor:
        """Return the additive mask [batch, 1, group * num_queries, max_seq_len]."""
        ...


class TorchLatentAttention:
    """Latent attention in torch operators. Keys past a sequence's end are read from the null page."""

    def __init__(self, keys: KeyReader) -> None:
        self.kernels: LatentKernels | None = None
        self._keys = keys

    def expect(self, batch_size: int) -> None:
        """Do nothing, since this form has no splits that depend on the batch size."""

    def write(self, cache: LayerCache, metadata: AttentionMetadata, rows: torch.Tensor) -> None:
        cache.kv.index_copy_(0, metadata.slot_mapping, rows)

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        value_width: int,
        scale: float,
    ) -> torch.Tensor:
        rows = self._rows(cache, metadata)
        batch, num_queries = rows.shape[0], metadata.num_queries
        _, num_heads, width = queries.shape
        # All heads become rows of one product, since there is one key head.
        grouped = queries.view(batch, num_queries, num_heads, width).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            grouped.reshape(batch, 1, num_heads * num_queries, width),
            rows,
            rows[..., :value_width],
            attn_mask=self._keys.mask(metadata, window, queries.dtype, num_heads),
            scale=scale,
        )
        out = out.view(batch, num_heads, num_queries, value_width).transpose(1, 2)
        return out.reshape(batch * num_queries, num_heads, value_width)

    def attend_unfolded(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        key_map: torch.Tensor,
        value_map: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = self._rows(cache, metadata).flatten(0, 2)
        num_heads, plain_width, rank = key_map.shape
        latents = rows[:, :rank].expand(num_heads, -1, -1)
        keys = rows.new_empty(len(rows), num_heads, queries.shape[2])
        torch.bmm(latents, key_map.transpose(1, 2), out=keys[..., :plain_width].transpose(0, 1))
        keys[..., plain_width:] = rows[:, None, rank:]
        values = rows.new_empty(len(rows), num_heads, value_map.shape[2])
        torch.bmm(latents, value_map, out=values.transpose(0, 1))
        # The rows of whole prompts see all keys up to their own. Without a mask the library has faster kernels.
        is_whole = metadata.known_len == metadata.num_queries and window is None
        of_requests = (each.unflatten(0, (len(metadata.page_table), -1)) for each in (queries, keys, values))
        queries, keys, values = (each.transpose(1, 2) for each in of_requests)
        mask = None if is_whole else self._keys.mask(metadata, window, queries.dtype, 1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=is_whole, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _rows(self, cache: LayerCache, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the rows at each key position: [batch, 1, max_seq_len, row_width]."""
        slots = self._keys.read_slots(metadata)
        return cache.kv.index_select(0, slots.view(-1)).view(slots.shape[0], 1, slots.shape[1], -1)
