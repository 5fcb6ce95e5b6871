"""The row selection of a block in which every row sees the whole block and the same context rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from spec_lab.core.types import AttentionMetadata


@dataclass(frozen=True, slots=True)
class WholeBlock:
    """A `RowSelection` in which all rows of a block see the same keys and attend as one row.

    Rows that see the same keys differ only in their queries, like the heads of one row. So the rows of a block become
    additional query heads of a single row. No mask is needed, and any attention backend will do.

    Attributes:
        attention: metadata of one query for each request, at the block's last row.
        num_kv_heads: of the layer; the query heads that share a KV head are adjacent.
    """

    attention: AttentionMetadata
    block_size: int
    num_kv_heads: int
    is_empty: ClassVar[bool] = False

    @property
    def live_rows(self) -> torch.Tensor | None:
        return None

    def queries(self, queries: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        by_kv_head = queries.view(-1, self.block_size, self.num_kv_heads, *self._group(queries)).transpose(1, 2)
        return by_kv_head.reshape(by_kv_head.shape[0], -1, queries.shape[2]), self.attention

    def attended(self, rows: torch.Tensor) -> torch.Tensor:
        by_kv_head = rows.view(rows.shape[0], self.num_kv_heads, self.block_size, -1).transpose(1, 2)
        return by_kv_head.reshape(rows.shape[0] * self.block_size, -1)

    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def live(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def behind(self, metadata: AttentionMetadata) -> AttentionMetadata | None:
        return metadata

    def _group(self, queries: torch.Tensor) -> tuple[int, int]:
        """Return how many query heads share a KV head, and the width of each."""
        return queries.shape[1] // self.num_kv_heads, queries.shape[2]
