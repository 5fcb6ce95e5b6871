"""The promises of the two pruning knobs: each chooses a `RowSelection` for a pass, which the layers then ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.prompts import LiveRows
from spec_lab.core.types import AttentionMetadata, FeatureSpec


class PromptPruning(Protocol):
    """Chooses which rows of the prompt pass go on (`prune.prefill`).

    `live` are the last rows of the prompts that end in the forward, None where none does.

    Attributes:
        needs_prewrite: a query attends over a cache that was written before (`AttentionBackend.prewrite`).
    """

    needs_prewrite: ClassVar[bool]

    def target_selection(self, live: LiveRows | None, features: FeatureSpec) -> RowSelection:
        """Select the rows that go on past the KV write of the target's last layer."""
        ...

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        """Pick the rows of `hidden` [kept rows, hidden_size] for which logits are computed."""
        ...

    def drafter_selection(self, live: LiveRows | None) -> RowSelection:
        """Select the rows that go on past the KV write of the drafter's layer."""
        ...


class CatchupPruning(Protocol):
    """Chooses which rows of the drafter's catch-up step go on (`prune.catchup`).

    Attributes:
        needs_prewrite: a query attends over a cache that was written before (`AttentionBackend.prewrite`).
        drops_rows: some rows may not go on. To a step that only writes KV, those are the rows that were not accepted.
    """

    needs_prewrite: ClassVar[bool]
    drops_rows: ClassVar[bool]

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        """Select rows: `live_rows` [batch] are flat row indices, `live_attention` has one query each, at the trimmed
        length."""
        ...

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> int:
        """Return how many of `num_rows` rows for each of `live_lens` are computed past the KV write.

        Args:
            live_lens: L + n of each request, as far as the round has committed it; 1 for a padded row.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """The two knobs together.

    Attributes:
        catchup_in_one_call: of the catch-up step all rows go through the whole layer, or the live ones alone, in every
            batch, so that one call may do all of it.
    """

    prompt: PromptPruning
    catchup: CatchupPruning
    catchup_in_one_call: bool = False

    @property
    def needs_prewrite(self) -> bool:
        """Says whether a query may have to attend over a cache that was written before."""
        return self.prompt.needs_prewrite or self.catchup.needs_prewrite
