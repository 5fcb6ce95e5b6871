"""The values of the two pruning knobs. See `PromptPruning` and `CatchupPruning`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.prompts import LiveRows
from spec_lab.core.types import AttentionMetadata, FeatureSpec
from spec_lab.pruning.selection import AfterAttention, AllRows, BeforeAttention, NoRows


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
        reads_all_rows = features.final_hidden is not None and not features.last_prompt_row
        return AllRows() if reads_all_rows else self.drafter_selection(live)

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        return hidden[:0] if live is None else live.of(hidden)

    def drafter_selection(self, live: LiveRows | None) -> RowSelection:
        return NoRows() if live is None else BeforeAttention(live.rows, live.attention)


class NoCatchupPruning:
    """prune.catchup=none: all rows of the catch-up step run through the whole layer."""

    needs_prewrite: ClassVar[bool] = False
    drops_rows: ClassVar[bool] = False

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AllRows(live_rows)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> int:
        return len(live_lens) * num_rows


class PruneAfterAttention:
    """prune.catchup=post_attention (tokenspeed #217): all rows attend, the live one goes on."""

    needs_prewrite: ClassVar[bool] = False
    drops_rows: ClassVar[bool] = True

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AfterAttention(live_rows)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> int:
        return len(live_lens)


class PruneBeforeAttention:
    """prune.catchup=pre_attention (tokenspeed #217): the live row alone attends, over the cache as written."""

    needs_prewrite: ClassVar[bool] = True
    drops_rows: ClassVar[bool] = True

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return BeforeAttention(live_rows, live_attention)

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> int:
        return len(live_lens)
