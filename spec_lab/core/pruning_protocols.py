"""The protocols of the two pruning knobs. Each chooses a `RowSelection` for a pass, which the layers use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from spec_lab.core.layer_protocols import RowSelection
    from spec_lab.core.prompts import LiveRows
    from spec_lab.core.types import AttentionMetadata, FeatureSpec


class Drop(Enum):
    """The places, after a layer's KV write, where the layer can drop unread rows.

    The catch-up step of `drafters.block_context` only writes KV. There NOWHERE means that rejected rows are written
    too.
    """

    NOWHERE = auto()
    BEFORE_ATTENTION = auto()
    BEHIND_ATTENTION = auto()


class LayerRows(NamedTuple):
    """The rows that parts of a layer compute: queries of attention, its output product, and the MLP."""

    attention: int
    output: int
    mlp: int


class PromptPruning(Protocol):
    """Chooses which rows of the prompt pass go on (`prune.prefill`).

    `live` are the last rows of the prompts that end in the forward; None if none ends.

    Attributes:
        needs_prewrite: whether rows are dropped between the KV write and attention, for which a backend needs
            `AttentionBackend.prewrite`.
    """

    needs_prewrite: ClassVar[bool]

    def target_selection(self, live: LiveRows | None, features: FeatureSpec) -> RowSelection:
        """Select the rows that go on past the last KV write of the target."""
        ...

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        """Pick from `hidden` [kept rows, hidden_size] the rows for which logits are computed."""
        ...

    def drafter_selection(self, live: LiveRows | None) -> RowSelection:
        """Select the rows that go on past the last KV write of the drafter, or of one of its modules."""
        ...


class CatchupPruning(Protocol):
    """Chooses which rows of the drafter's catch-up step go on (`prune.catchup`).

    Attributes:
        needs_prewrite: whether rows are dropped between the KV write and attention, for which a backend needs
            `AttentionBackend.prewrite`.
    """

    needs_prewrite: ClassVar[bool]

    def selection(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        """Select rows. `live_rows` [batch] are flat row indices. `live_attention` has one query for each, whose keys
        end at the live row."""
        ...

    def num_computed(self, live_lens: Sequence[int], num_rows: int) -> LayerRows:
        """Return how many rows are computed past the last KV write, in a pass of `num_rows` rows for each request.

        Args:
            live_lens: L + n of each request; 1 for a request that only pads the batch.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """The two pruning knobs together.

    Attributes:
        drop: where `catchup` drops rows that are not live; None if that depends on the batch.
    """

    prompt: PromptPruning
    catchup: CatchupPruning
    drop: Drop | None = None

    @property
    def drops_rows(self) -> bool:
        """Return whether only the live rows of the catch-up step go on, in every batch."""
        return self.drop in (Drop.BEFORE_ATTENTION, Drop.BEHIND_ATTENTION)

    def of_catchup(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> RowSelection:
        """Return the row selection of a catch-up step; see `CatchupPruning.selection`."""
        return self.catchup.selection(live_rows, live_attention)
