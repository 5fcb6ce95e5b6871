"""Row selections: where in a layer dead rows are dropped; and the values of the two pruning knobs, which choose one
for a pass. KV is written for all rows in every one of them.

`live_rows` are flat indices into [batch * num_queries] rows. The residual is always cut to the rows that meet it. What
the knobs promise is said at `PromptPruning` and `CatchupPruning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.prompts import LiveRows
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata, FeatureSpec


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
    """All rows attend, the live ones meet the output projection (tokenspeed #217, any backend).

    `live_attention`, where it is given, is of the live rows alone, for layers behind.
    """

    live_rows: torch.Tensor
    live_attention: AttentionMetadata | None = None
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
        return self.live_attention


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


class AllPromptRows:
    """prune.prefill=all_rows: every prompt token is an output row, as in llama.cpp's MTP before #149."""

    needs_prewrite: ClassVar[bool] = False

    def target_selection(self, live: LiveRows | None, features: FeatureSpec) -> RowSelection:
        return AllRows()

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        return hidden

    def drafter_selection(self, live: LiveRows | None) -> RowSelection:
        return AllRows() if live is None else AllRows(live.rows)


class LastPromptRow:
    """prune.prefill=last_row: hidden rows for the tokens the drafter needs, logits for one row a request (#149).

    In the target's last layer only rows somebody reads go on; that is every row if the drafter reads the
    final hidden of the whole prompt.
    """

    needs_prewrite: ClassVar[bool] = True

    def target_selection(self, live: LiveRows | None, features: FeatureSpec) -> RowSelection:
        if features.final_hidden is not None and not features.last_prompt_row:
            return AllRows()
        if live is not None and live.attend_with_others:
            return AfterAttention(live.rows, live.attention)
        return self.drafter_selection(live)

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        return hidden[:0] if live is None else live.of(hidden)

    def drafter_selection(self, live: LiveRows | None) -> RowSelection:
        return NoRows() if live is None else BeforeAttention(live.rows, live.attention)


class NoCatchupPruning:
    """prune.catchup=none: all rows of the catch-up step run through the whole layer."""

    needs_prewrite: ClassVar[bool] = False

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AllRows(live_rows)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> int:
        return len(live_lens) * num_rows


class PruneAfterAttention:
    """prune.catchup=post_attention (tokenspeed #217): all rows attend, the live one goes on."""

    needs_prewrite: ClassVar[bool] = False

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AfterAttention(live_rows)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> int:
        return len(live_lens)


class PruneBeforeAttention:
    """prune.catchup=pre_attention (tokenspeed #217): the live row alone attends, over the cache as written."""

    needs_prewrite: ClassVar[bool] = True

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return BeforeAttention(live_rows, live_attention)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> int:
        return len(live_lens)
