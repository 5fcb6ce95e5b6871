"""Row selections: where in a layer dead rows are dropped. KV is written for all rows in every one of them.

`live_rows` are flat indices into [batch * num_queries] rows. The residual is always cut to the rows that meet it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AllRows:
    """Nothing is dropped inside the layer; `live_rows`, when given, are picked from its output."""

    live_rows: torch.Tensor | None = None
    is_empty: ClassVar[bool] = False

    def queries(self, queries: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        return queries, metadata

    def attended(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def live(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.live_rows is None else rows_at(rows, self.live_rows)

    def behind(self, metadata: AttentionMetadata) -> AttentionMetadata | None:
        return metadata


@dataclass(frozen=True, slots=True)
class NoRows(AllRows):
    """KV only: a layer whose output nobody reads (llama.cpp fork #149: a draft's prompt pass marks no outputs)."""

    is_empty: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class AfterAttention:
    """All rows attend, the live ones meet the output projection (tokenspeed #217, any backend)."""

    live_rows: torch.Tensor
    is_empty: ClassVar[bool] = False

    def queries(self, queries: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        return queries, metadata

    def attended(self, rows: torch.Tensor) -> torch.Tensor:
        return rows_at(rows, self.live_rows)

    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        return rows_at(rows, self.live_rows)

    def live(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def behind(self, metadata: AttentionMetadata) -> AttentionMetadata | None:
        return None


@dataclass(frozen=True, slots=True)
class BeforeAttention:
    """Only the live rows attend, one query a request over the cache as written (tokenspeed #217, prewrite backends).

    `live_attention` carries the trimmed length: a lone query with the untrimmed one would see the rejected tail.
    """

    live_rows: torch.Tensor
    live_attention: AttentionMetadata
    is_empty: ClassVar[bool] = False

    def queries(self, queries: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        return rows_at(queries, self.live_rows), self.live_attention

    def attended(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        return rows_at(rows, self.live_rows)

    def live(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def behind(self, metadata: AttentionMetadata) -> AttentionMetadata | None:
        return self.live_attention
