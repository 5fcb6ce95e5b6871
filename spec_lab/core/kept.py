"""The rows of a layer that go on, and the two pruning knobs that choose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch

from spec_lab.core.prompts import LiveRows
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata, FeatureSpec, NormSide


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


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that a layer keeps, and where it drops the others. The layer asks at each place what goes on there.

    KV is always written for all rows. The residual stream keeps the same rows as the output that is added to it.

    Attributes:
        drop: AFTER_ATTENTION and BEFORE_ATTENTION are tokenspeed #217's; EVERYTHING, for a layer whose output is not
            read, is llama.cpp fork #149's.
        rows: flat indices [live rows] of the rows that are read; None if none is, or with NOTHING all are.
        metadata: of the live rows alone, with their own lengths: with the untrimmed length a query would see rejected
            rows.
    """

    drop: Drop = Drop.NOTHING
    rows: torch.Tensor | None = None
    metadata: AttentionMetadata | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether no row goes on, so that the layer only writes KV."""
        return self.drop is Drop.EVERYTHING

    def queries(self, queries: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        """Pick the rows that attend, and return them with their metadata."""
        if self.drop is not Drop.BEFORE_ATTENTION:
            return queries, metadata
        assert self.metadata is not None
        return self._of(queries), self.metadata

    def attended(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the rows of the attention output that go on."""
        return self._of(rows) if self.drop is Drop.AFTER_ATTENTION else rows

    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the residual rows of the rows that go on."""
        return self._of(rows) if self.drop.is_inside else rows

    def live(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the live rows of the layer's output, if they were not picked inside the layer."""
        return self._of(rows) if self.drop is Drop.AFTER_LAYER else rows

    def behind(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata of the rows that go on, for the layers after this one."""
        if not self.drop.is_inside:
            return metadata
        assert self.metadata is not None
        return self.metadata

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:0] if self.rows is None else rows_at(rows, self.rows)


ALL_ROWS = Kept()


class PromptPruning(Protocol):
    """Chooses which rows of the prompt pass go on (`prune.prefill`).

    `live` are the last rows of the prompts that end in the forward; None if none ends.
    """

    def in_target(self, live: LiveRows | None, features: FeatureSpec) -> Kept:
        """Choose the rows that go on past the last KV write of the target."""
        ...

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        """Pick from `hidden` [kept rows, hidden_size] the rows for which logits are computed."""
        ...

    def in_drafter(self, live: LiveRows | None) -> Kept:
        """Choose the rows that go on past the last KV write of the drafter, or of one of its modules."""
        ...


class AllPromptRows:
    """prune.prefill=all_rows: every prompt row is an output row of the target, as in llama.cpp's MTP before #149."""

    def in_target(self, live: LiveRows | None, features: FeatureSpec) -> Kept:
        return ALL_ROWS

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        return hidden

    def in_drafter(self, live: LiveRows | None) -> Kept:
        return ALL_ROWS if live is None else Kept(Drop.AFTER_LAYER, live.rows)


class LastPromptRow:
    """prune.prefill=last_row: hidden states for the rows that the drafter needs, logits for a prompt's last row (#149).

    Past the target's last KV write only rows that are read go on. These are all rows if the drafter reads the final
    hidden states of the whole prompt. If it reads them before the final norm, only the last row is normed.
    """

    def in_target(self, live: LiveRows | None, features: FeatureSpec) -> Kept:
        if features.final_hidden is not None and not features.last_prompt_row:
            if features.final_hidden is NormSide.POST_NORM:
                return ALL_ROWS
            return Kept(Drop.AFTER_LAYER, None if live is None else live.rows)
        if live is not None and live.attend_with_others:
            return Kept(Drop.AFTER_ATTENTION, live.rows, live.attention)
        return self.in_drafter(live)

    def logit_rows(self, hidden: torch.Tensor, live: LiveRows | None) -> torch.Tensor:
        return hidden[:0] if live is None else live.of(hidden)

    def in_drafter(self, live: LiveRows | None) -> Kept:
        if live is None:
            return Kept(Drop.EVERYTHING)
        return Kept(Drop.BEFORE_ATTENTION, live.rows, live.attention)


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
        return Kept(self.catchup(live_attention.seq_lens.shape[0]), live_rows, live_attention)
