"""The reference backend for rounds whose drafts are a tree."""

from __future__ import annotations

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.draft_tree import TreeRows, climb
from spec_lab.core.kv_cache import cache_slots
from spec_lab.core.types import AttentionMetadata


class TorchTreeAttention(TorchAttention):
    """Attention along trees in torch operators. Rows of chains, such as a prompt's, attend as in the base class."""

    def build_tree(
        self, parents: torch.Tensor, depth: int, prefix_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        paths, depths = climb(parents, depth)
        slots = self._tail_slots(prefix_lens, page_table, 0, parents.shape[1])
        path_slots = slots.gather(1, paths.flatten(1)).view_as(paths)
        rows = TreeRows(path_slots, depths, parents.shape[1])
        return self._metadata(rows, slots, prefix_lens, page_table, max_seq_len)

    def build_branches(
        self,
        before: TreeRows | None,
        came_from: torch.Tensor,
        prefix_lens: torch.Tensor,
        page_table: torch.Tensor,
        max_seq_len: int,
    ) -> AttentionMetadata:
        num_before = 0 if before is None else before.num_tail
        num_tail = num_before + came_from.shape[1]
        slots = self._tail_slots(prefix_lens, page_table, num_before, num_tail)
        path_slots, depths = slots.unsqueeze(2), torch.zeros_like(slots)
        if before is not None:
            depth = before.path_slots.shape[2]
            inherited = before.path_slots.gather(1, came_from.unsqueeze(2).expand(-1, -1, depth))
            path_slots, depths = torch.cat((inherited, path_slots), dim=2), depths + depth
        return self._metadata(TreeRows(path_slots, depths, num_tail), slots, prefix_lens, page_table, max_seq_len)

    def _tail_slots(self, prefix_lens: torch.Tensor, page_table: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Return the slots of the keys with numbers [first, end) after the prefix."""
        numbers = torch.arange(first, end, device=prefix_lens.device)
        return cache_slots(page_table, prefix_lens.unsqueeze(1) + numbers, self.page_size)

    def _metadata(
        self,
        rows: TreeRows,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        page_table: torch.Tensor,
        max_seq_len: int,
    ) -> AttentionMetadata:
        """Make the metadata for rows that write to `slots` [batch, num_queries]."""
        return AttentionMetadata(
            positions=(prefix_lens.unsqueeze(1) + rows.depths).clamp(0, self.max_positions - 1).reshape(-1),
            slot_mapping=slots.reshape(-1),
            seq_lens=prefix_lens + rows.num_tail,
            page_table=page_table,
            num_queries=slots.shape[1],
            max_seq_len=max_seq_len,
            tree=rows,
        )

    def _visible(self, metadata: AttentionMetadata, window: int | None) -> torch.Tensor:
        rows = metadata.tree
        if rows is None:
            return super()._visible(metadata, window)
        num_queries, path_len = rows.path_slots.shape[1:]
        prefix_lens = metadata.seq_lens - rows.num_tail
        key_positions = torch.arange(metadata.max_seq_len, device=prefix_lens.device)
        # The number of each key after the prefix; keys of the prefix have negative numbers.
        numbers = (key_positions - prefix_lens.unsqueeze(1)).unsqueeze(1).expand(-1, num_queries, -1)
        ends = rows.depths.unsqueeze(2) + 1
        on_path = torch.arange(path_len, device=prefix_lens.device) < ends
        prefix = numbers < 0
        if window is not None:
            prefix = prefix & (numbers >= ends - window)
            on_path = on_path & (torch.arange(path_len, device=prefix_lens.device) >= ends - window)
        tail_slots = self._tail_slots(prefix_lens, metadata.page_table, 0, rows.num_tail)
        is_same = rows.path_slots.unsqueeze(2) == tail_slots.view(-1, 1, rows.num_tail, 1)
        tail = (is_same & on_path.unsqueeze(2)).any(dim=3)
        in_tail = (numbers >= 0) & (numbers < rows.num_tail)
        return torch.where(in_tail, tail.gather(2, numbers.clamp(0, rows.num_tail - 1)), prefix)
