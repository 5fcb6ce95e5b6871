"""The reference backend for rounds whose drafts are a tree."""

from __future__ import annotations

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.draft_tree import TreeRows
from spec_lab.core.kv_cache import cache_slots
from spec_lab.core.types import AttentionMetadata


class TorchTreeAttention(TorchAttention):
    """Keeps the protocol `TreeAttentionBackend`. Rows of chains, as a prompt's, attend as they do in its base."""

    def build_tree(
        self, rows: TreeRows, prefix_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        num_queries, num_tail = rows.visible.shape[1:]
        start = prefix_lens.unsqueeze(1)
        tail = torch.arange(num_tail - num_queries, num_tail, device=prefix_lens.device)
        return AttentionMetadata(
            positions=(start + rows.depths).clamp(0, self._max_positions - 1).reshape(-1),
            slot_mapping=cache_slots(page_table, start + tail, self._page_size).reshape(-1),
            seq_lens=prefix_lens + num_tail,
            page_table=page_table,
            num_queries=num_queries,
            max_seq_len=max_seq_len,
            tree=rows,
        )

    def _visible(self, metadata: AttentionMetadata, window: int | None) -> torch.Tensor:
        rows = metadata.tree
        if rows is None:
            return super()._visible(metadata, window)
        num_queries, num_tail = rows.visible.shape[1:]
        prefix_lens = (metadata.seq_lens - num_tail).unsqueeze(1)
        key_positions = torch.arange(metadata.max_seq_len, device=prefix_lens.device)
        # The number of each key behind the prefix; keys of the prefix come before number 0.
        numbers = (key_positions - prefix_lens).unsqueeze(1).expand(-1, num_queries, -1)
        prefix, tail = numbers < 0, rows.visible
        if window is not None:
            prefix = prefix & (numbers > rows.depths.unsqueeze(2) - window)
            tail = tail & (rows.key_depths.unsqueeze(1) > rows.depths.unsqueeze(2) - window)
        in_tail = (numbers >= 0) & (numbers < num_tail)
        return torch.where(in_tail, tail.gather(2, numbers.clamp(0, num_tail - 1)), prefix)
