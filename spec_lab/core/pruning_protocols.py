"""The promises of the two pruning knobs: each chooses a `RowSelection` for a pass, which the layers then ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from spec_lab.core.layer_protocols import RowSelection
    from spec_lab.core.prompts import LiveRows
    from spec_lab.core.types import AttentionMetadata, FeatureSpec


class Drop(Enum):
    """Where in a layer, behind its KV write, the rows end that nobody reads.

    A step that does nothing but write KV leaves them out, unless they end nowhere.
    """

    NOWHERE = auto()
    BEFORE_ATTENTION = auto()
    BEHIND_ATTENTION = auto()


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
    """

    needs_prewrite: ClassVar[bool]

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
        drop: where `catchup` ends the rows that are not live, in every batch; None where that differs.
    """

    prompt: PromptPruning
    catchup: CatchupPruning
    drop: Drop | None = None

    @property
    def needs_prewrite(self) -> bool:
        """Says whether a query may have to attend over a cache that was written before."""
        return self.prompt.needs_prewrite or self.catchup.needs_prewrite

    @property
    def drops_rows(self) -> bool:
        """Says whether of the catch-up step the live rows alone go on, in every batch."""
        return self.drop in (Drop.BEFORE_ATTENTION, Drop.BEHIND_ATTENTION)
