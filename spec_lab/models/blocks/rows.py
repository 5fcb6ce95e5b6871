"""The rows of a block that see the whole block: with the same rows of context, or each with a window of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.kept import Kept
from spec_lab.core.passes import Pass
from spec_lab.core.ragged import attend
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.layers import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBlock(Kept):
    """Keeps all rows. The rows of a block see the same keys, and attend as one row.

    Rows that see the same keys differ only in their queries, like the heads of one row. So the rows of a block become
    additional query heads of a single row. No mask is needed, and any attention backend will do.

    Attributes:
        as_one: metadata of one query for each request, at the block's last row.
        num_kv_heads: of the layer; the query heads that share a KV head are adjacent.
    """

    as_one: AttentionMetadata
    block_size: int
    num_kv_heads: int

    def queries(self, queries: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        group, width = queries.shape[1] // self.num_kv_heads, queries.shape[2]
        by_kv_head = queries.view(-1, self.block_size, self.num_kv_heads, group, width).transpose(1, 2)
        return by_kv_head.reshape(by_kv_head.shape[0], -1, width), self.as_one

    def attended(self, rows: torch.Tensor) -> torch.Tensor:
        by_kv_head = rows.view(rows.shape[0], self.num_kv_heads, self.block_size, -1).transpose(1, 2)
        return by_kv_head.reshape(rows.shape[0] * self.block_size, -1)


@dataclass(slots=True, kw_only=True)
class MovingWindow(Attention):
    """Attention in which row i of a block sees the whole block, and keys from position L' + i - window + 1 on (z-lab's
    `query - key < window`).

    The rows see different keys, so each of them attends by itself, as a request's only query at the block's last row.

    Attributes:
        windows: for each row of a block, how many keys it sees, counted back from the block's last row.
    """

    windows: tuple[int, ...]

    def mixed(self, queries: torch.Tensor, at: Pass) -> torch.Tensor:
        kept = at.kept
        assert isinstance(kept, WholeBlock)
        rows = queries.unflatten(0, (-1, kept.block_size)).unbind(1)
        attended = [
            attend(self.backend, row.contiguous(), at.cache, kept.as_one, window, self.scale)
            for row, window in zip(rows, self.windows, strict=True)
        ]
        return torch.stack(attended, dim=1).flatten(0, 1)
