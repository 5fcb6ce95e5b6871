"""The reference backend: gathers each request's keys and values and calls scaled_dot_product_attention. Any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_kernels.narrow_kv_reference import read_rows, write_rows
from spec_lab.attention.torch_latent import TorchLatentAttention
from spec_lab.core.kv_cache import NULL_PAGE, LayerCache, cache_slots
from spec_lab.core.latent_protocols import LatentAttentionBackend
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.core.types import AttentionKind, AttentionMetadata


class TorchAttention:
    """An `AttentionBackend` in torch. Keys past a sequence's end are read from the null page and masked."""

    def __init__(self, page_size: int, max_positions: int, rope_write: RopeWrite | None = None) -> None:
        self.rope_write = rope_write
        self.latent: LatentAttentionBackend | None = TorchLatentAttention(self)
        self.page_size = page_size
        self.max_positions = max_positions

    def build(
        self, positions: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        return AttentionMetadata(
            positions=positions.clamp(0, self.max_positions - 1).reshape(-1),
            slot_mapping=cache_slots(page_table, positions, self.page_size).reshape(-1),
            seq_lens=seq_lens.clamp(min=1),
            page_table=page_table,
            num_queries=positions.shape[1],
            max_seq_len=max_seq_len,
        )

    def advance(self, metadata: AttentionMetadata) -> None:
        assert metadata.num_queries == 1
        next_positions = metadata.seq_lens.unsqueeze(1)
        metadata.slot_mapping.copy_(cache_slots(metadata.page_table, next_positions, self.page_size).squeeze(1))
        metadata.positions.copy_(metadata.seq_lens.clamp(max=self.max_positions - 1))
        metadata.seq_lens.add_(1)
        if metadata.read_slots is not None:
            metadata.read_slots.copy_(self._read_slots(metadata))
        for (window, group), mask in metadata.masks.items():
            mask.copy_(self._mask(metadata, window, mask.dtype, group))

    def derive(self, metadata: AttentionMetadata, kind: AttentionKind, dtype: torch.dtype) -> None:
        self.read_slots(metadata)
        self.mask(metadata, kind.window, dtype, kind.group)

    def write(self, cache: LayerCache, metadata: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = torch.cat((keys, values), dim=1).view(-1, *cache.kv.shape[1:])
        write_rows(cache.kv, cache.powers, rows, metadata.slot_mapping)

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slots = self.read_slots(metadata)
        batch, num_keys = slots.shape
        num_queries = metadata.num_queries
        _, _, num_kv_heads, head_dim = cache.kv.shape
        group = queries.shape[1] // num_kv_heads
        kv = read_rows(cache.kv, cache.powers, slots.view(-1), queries.dtype)
        kv = kv.view(batch, num_keys, 2, num_kv_heads, head_dim)
        keys, values = kv.permute(2, 0, 3, 1, 4).unbind(0)
        # The query heads that share a KV head become rows of one product, so keys are not repeated.
        grouped = queries.view(batch, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        mask = self.mask(metadata, window, queries.dtype, group)
        if sinks is not None:
            keys, values, mask = with_sink(keys, values, mask, sinks)
        out = F.scaled_dot_product_attention(
            grouped.reshape(batch, num_kv_heads, group * num_queries, head_dim),
            keys,
            values,
            attn_mask=mask,
            scale=scale,
        )
        out = out.view(batch, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch * num_queries, -1)

    def read_slots(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the slot of each key position, [batch, max_seq_len], computed on first use."""
        if metadata.read_slots is None:
            metadata.read_slots = self._read_slots(metadata)
        return metadata.read_slots

    def mask(self, metadata: AttentionMetadata, window: int | None, dtype: torch.dtype, group: int) -> torch.Tensor:
        """Return the additive mask [batch, 1, group * num_queries, max_seq_len], computed on first use."""
        mask = metadata.masks.get((window, group))
        if mask is None:
            mask = metadata.masks[window, group] = self._mask(metadata, window, dtype, group)
        return mask

    def _read_slots(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the slot of each key position, [batch, max_seq_len], which is the null slot past a sequence's end."""
        num_keys = metadata.max_seq_len
        num_columns = -(-num_keys // self.page_size)
        pages = metadata.page_table[:, :num_columns]
        if pages.shape[1] < num_columns:  # junk rows of a last round lie past the cache, and read the scratch page
            pages = torch.cat((pages, pages[:, -1:].expand(-1, num_columns - pages.shape[1])), dim=1)
        offsets = torch.arange(self.page_size, device=pages.device)
        slots = (pages.unsqueeze(2) * self.page_size + offsets).flatten(1)[:, :num_keys]
        key_positions = torch.arange(num_keys, device=pages.device)
        null_slot = NULL_PAGE * self.page_size
        return torch.where(key_positions < metadata.seq_lens.unsqueeze(1), slots, null_slot)

    def _mask(self, metadata: AttentionMetadata, window: int | None, dtype: torch.dtype, group: int) -> torch.Tensor:
        """Return the additive mask [batch, 1, group * num_queries, max_seq_len]: 0 where a row sees a key, -inf
        elsewhere."""
        visible = self._visible(metadata, window)
        # A padding row that sees no key would give NaN, so it sees position 0 instead.
        visible[..., 0] |= ~visible.any(-1)
        mask = torch.full(visible.shape, float("-inf"), dtype=dtype, device=visible.device).masked_fill_(visible, 0.0)
        return mask.unsqueeze(1).repeat(1, 1, group, 1)

    def _visible(self, metadata: AttentionMetadata, window: int | None) -> torch.Tensor:
        """Return which keys each row sees, [batch, num_queries, max_seq_len]."""
        device = metadata.seq_lens.device
        key_positions = torch.arange(metadata.max_seq_len, device=device)
        behind = torch.arange(metadata.num_queries - 1, -1, -1, device=device)
        ends = (metadata.lens_in(window).unsqueeze(1) - behind).unsqueeze(2)
        visible = key_positions < ends
        if window is not None:
            visible &= key_positions >= ends - window
        return visible


def with_sink(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key of zeros with a value of zeros, whose score is therefore its mask: the sink of each head.

    Args:
        keys: [batch, num_kv_heads, num_keys, head_dim], as `values`.
        mask: additive, [batch, 1, group * num_queries, num_keys], the rows of one head after another.
        sinks: [num_heads].
    """
    batch, num_kv_heads = keys.shape[:2]
    num_rows = mask.shape[2]
    num_queries = num_rows * num_kv_heads // len(sinks)
    scores = sinks.to(mask.dtype).view(1, num_kv_heads, -1, 1).repeat_interleave(num_queries, dim=2)
    parts = mask.expand(-1, num_kv_heads, -1, -1), scores.expand(batch, -1, -1, -1)
    return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1)), torch.cat(parts, dim=3)
