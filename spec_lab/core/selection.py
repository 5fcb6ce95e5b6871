"""Row selections: where a layer drops dead rows. Also the values of the two pruning knobs, which choose a selection.

With every selection, KV is written for all rows. `live_rows` are flat indices into the [batch * num_queries] rows. The
residual stream keeps the same rows as the output that is added to it. `PromptPruning` and `CatchupPruning` define what
the knobs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.prompts import LiveRows
from spec_lab.core.pruning_protocols import LayerRows
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata, FeatureSpec, NormSide


@dataclass(frozen=True, slots=True)
class AllRows:
    """Drops nothing inside the layer; `live_rows`, if given, are picked from its output."""

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
class UnreadRows(AllRows):
    """Drops nothing inside the layer, and reads no row of its output: the middle of a prompt whose features precede the
    final norm."""

    def live(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:0]


@dataclass(frozen=True, slots=True)
class NoRows(AllRows):
    """Only KV is written, for a layer whose output is not read (llama.cpp fork #149: a draft's prompt pass marks no
    outputs)."""

    is_empty: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class AfterAttention:
    """All rows attend, but only the live ones enter the output projection (tokenspeed #217, any backend).

    `live_attention`, if given, is metadata of the live rows, for later layers.
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
    """Only the live rows attend, as one query each, after all KV is written (tokenspeed #217, prewrite backends).

    `live_attention` has the trimmed length. With the untrimmed length a single query would see the rejected rows.
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
    """prune.prefill=all_rows: every prompt row is an output row of the target, as in llama.cpp's MTP before #149."""

    needs_prewrite: ClassVar[bool] = False

    def target_selection(self, live: LiveRows | None, features: FeatureSpec) -> RowSelection:
        return AllRows()

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        return hidden

    def drafter_selection(self, live: LiveRows | None) -> RowSelection:
        return AllRows() if live is None else AllRows(live.rows)


class LastPromptRow:
    """prune.prefill=last_row: hidden states for the rows that the drafter needs, logits for a prompt's last row (#149).

    Past the target's last KV write only rows that are read go on. These are all rows if the drafter reads the final
    hidden states of the whole prompt. If it reads them before the final norm, only the last row is normed.
    """

    needs_prewrite: ClassVar[bool] = True

    def target_selection(self, live: LiveRows | None, features: FeatureSpec) -> RowSelection:
        if features.final_hidden is not None and not features.last_prompt_row:
            if features.final_hidden is NormSide.POST_NORM:
                return AllRows()
            return UnreadRows() if live is None else AllRows(live.rows)
        if live is not None and live.attend_with_others:
            return AfterAttention(live.rows, live.attention)
        return self.drafter_selection(live)

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        return hidden[:0] if live is None else live.of(hidden)

    def drafter_selection(self, live: LiveRows | None) -> RowSelection:
        return NoRows() if live is None else BeforeAttention(live.rows, live.attention)


class NoCatchupPruning:
    """prune.catchup=none: a layer drops no row of the catch-up step."""

    needs_prewrite: ClassVar[bool] = False

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AllRows(live_rows)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> LayerRows:
        num_all = len(live_lens) * num_rows
        return LayerRows(num_all, num_all, num_all)


class PruneAfterAttention:
    """prune.catchup=post_attention (tokenspeed #217): all rows attend, and only the live row goes on."""

    needs_prewrite: ClassVar[bool] = False

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AfterAttention(live_rows)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> LayerRows:
        return LayerRows(len(live_lens) * num_rows, len(live_lens), len(live_lens))


class PruneBeforeAttention:
    """prune.catchup=pre_attention (tokenspeed #217): only the live row attends, after all KV is written."""

    needs_prewrite: ClassVar[bool] = True

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return BeforeAttention(live_rows, live_attention)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> LayerRows:
        return LayerRows(len(live_lens), len(live_lens), len(live_lens))
