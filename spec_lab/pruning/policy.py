"""The values of the two pruning knobs. See `PromptPruning` and `CatchupPruning`."""

from __future__ import annotations

from typing import ClassVar

import torch

from spec_lab.core.protocols import RowSelection
from spec_lab.core.types import AttentionMetadata, FeatureSpec
from spec_lab.pruning.selection import AfterAttention, AllRows, BeforeAttention, NoRows


def _last_row(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([num_rows - 1], device=like.device)


class AllPromptRows:
    """prune.prefill=all_rows: every prompt token is an output row, as in llama.cpp's MTP before #149."""

    needs_prewrite: ClassVar[bool] = False

    def target_selection(
        self, num_rows: int, live_attention: AttentionMetadata | None, features: FeatureSpec
    ) -> RowSelection:
        return AllRows()

    def logit_rows(self, hidden: torch.Tensor, is_last: bool) -> torch.Tensor:
        return hidden

    def drafter_selection(self, num_rows: int, live_attention: AttentionMetadata | None) -> RowSelection:
        return AllRows() if live_attention is None else AllRows(_last_row(num_rows, live_attention.positions))


class LastPromptRow:
    """prune.prefill=last_row: hidden rows for the tokens the drafter needs, logits for one row a request (#149).

    In the target's last layer only rows somebody reads go on; that is every row if the drafter reads the
    final hidden of the whole prompt.
    """

    needs_prewrite: ClassVar[bool] = True

    def target_selection(
        self, num_rows: int, live_attention: AttentionMetadata | None, features: FeatureSpec
    ) -> RowSelection:
        reads_all_rows = features.final_hidden is not None and not features.last_prompt_row
        return AllRows() if reads_all_rows else self.drafter_selection(num_rows, live_attention)

    def logit_rows(self, hidden: torch.Tensor, is_last: bool) -> torch.Tensor:
        return hidden[-1:] if is_last else hidden[:0]

    def drafter_selection(self, num_rows: int, live_attention: AttentionMetadata | None) -> RowSelection:
        if live_attention is None:
            return NoRows()
        return BeforeAttention(_last_row(num_rows, live_attention.positions), live_attention)


class NoCatchupPruning:
    """prune.catchup=none: all rows of the catch-up step run through the whole layer."""

    needs_prewrite: ClassVar[bool] = False

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AllRows(live_rows)

    def num_computed(self, num_requests: int, num_rows: int) -> int:
        return num_requests * num_rows


class PruneAfterAttention:
    """prune.catchup=post_attention (tokenspeed #217): all rows attend, the live one goes on."""

    needs_prewrite: ClassVar[bool] = False

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return AfterAttention(live_rows)

    def num_computed(self, num_requests: int, num_rows: int) -> int:
        return num_requests


class PruneBeforeAttention:
    """prune.catchup=pre_attention (tokenspeed #217): the live row alone attends, over the cache as written."""

    needs_prewrite: ClassVar[bool] = True

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        return BeforeAttention(live_rows, live_attention)

    def num_computed(self, num_requests: int, num_rows: int) -> int:
        return num_requests
