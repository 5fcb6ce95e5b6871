"""Where a layer drops unread rows, and the two pruning knobs that choose it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from spec_lab.core.kept import Kept
    from spec_lab.core.prompts import LiveRows
    from spec_lab.core.types import AttentionMetadata, FeatureSpec


class Drop(Enum):
    """The place, behind a layer's KV write, where the layer drops the rows that nobody reads.

    The catch-up step of `drafters.block_context` only writes KV. There AFTER_LAYER means that rejected rows are written
    too.
    """

    NOTHING = auto()
    AFTER_LAYER = auto()
    AFTER_ATTENTION = auto()
    BEFORE_ATTENTION = auto()
    EVERYTHING = auto()

    @property
    def is_inside(self) -> bool:
        """Return whether rows are dropped inside the layer: all of them, or all but the live ones."""
        return self not in (Drop.NOTHING, Drop.AFTER_LAYER)


class LayerRows(NamedTuple):
    """The rows that parts of a layer compute: queries of attention, its output product, and the MLP."""

    attention: int
    output: int
    mlp: int

    @classmethod
    def of(cls, drop: Drop, num_live: int, num_rows: int) -> LayerRows:
        """Count them for a layer of `num_rows` rows, of which `num_live` are read."""
        attending = num_live if drop is Drop.BEFORE_ATTENTION else num_rows
        going_on = num_live if drop.is_inside else num_rows
        return cls(attending, going_on, going_on)


class PromptPruning(Protocol):
    """Chooses which rows of the prompt pass go on (`prune.prefill`).

    `live` are the last rows of the prompts that end in the forward; None if none ends.

    Attributes:
        needs_prewrite: whether rows are dropped between the KV write and attention, for which a backend needs
            `AttentionBackend.prewrite`.
    """

    needs_prewrite: ClassVar[bool]

    def in_target(self, live: LiveRows | None, features: FeatureSpec) -> Kept:
        """Choose the rows that go on past the last KV write of the target."""
        ...

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        """Pick from `hidden` [kept rows, hidden_size] the rows for which logits are computed."""
        ...

    def in_drafter(self, live: LiveRows | None) -> Kept:
        """Choose the rows that go on past the last KV write of the drafter, or of one of its modules."""
        ...


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """The two pruning knobs together.

    Attributes:
        catchup: returns where the catch-up step of a number of requests, padding included, drops all rows but the live
            ones (`prune.catchup`).
    """

    prompt: PromptPruning
    catchup: Callable[[int], Drop]

    def of_catchup(self, live_rows: torch.Tensor, live_attention: AttentionMetadata) -> Kept:
        """Return the rows that a catch-up step keeps.

        `live_rows` are flat row indices. `live_attention` is the metadata of these rows alone, whose keys end at them.
        """
        from spec_lab.core.kept import Kept

        return Kept(self.catchup(live_attention.seq_lens.shape[0]), live_rows, live_attention)
