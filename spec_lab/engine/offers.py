"""Drafts may all count, or as many of them as each request offers."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from spec_lab.core.draft_tree import climb, keep_rows
from spec_lab.core.types import RoundBatch
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.offered import DraftOffers, RowOffers
from spec_lab.engine.parts import Parts
from spec_lab.engine.stopping_loop import DraftLoop, EveryStep, make_draft_loop


class Offers(Protocol):
    """Says of each request how many drafts it offers to verification, and when drafting ends.

    Attributes:
        num_draft_tokens: K, the most drafts a request that are verified.
        max_drafted: the most drafts a request that the draft loop makes.
        loop: says which draft steps run.
    """

    num_draft_tokens: int
    max_drafted: int
    loop: DraftLoop

    def mark(self, batch: RoundBatch) -> RoundBatch:
        """Note how many drafts each request offers, and leave out what nobody can offer."""
        ...

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Take note that drafts of `slot_ids` [batch] are being made."""
        ...

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return how many drafts [batch] were made, where only the device knows it; else None."""
        ...


class AllOffered:
    """Offers under which every draft counts."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = self.max_drafted = num_draft_tokens
        self.loop: DraftLoop = EveryStep()

    def mark(self, batch: RoundBatch) -> RoundBatch:
        return batch

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Do nothing: nobody counts."""

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return None


class Counted:
    """Offers of a part of a chain: `offered` counts the drafts of each request, K at most.

    Shapes are those of K: a draft that is not offered is verified like any other, and never accepted. Where nothing is
    captured, rows that nobody offers are left out, and drafting ends with the last request that goes on.
    """

    def __init__(
        self, parts: Parts, offered: DraftOffers, num_draft_tokens: int, recorder: GraphRecorder | None
    ) -> None:
        """`recorder` captures the stages: the host then reads nothing, and every round has all its rows. None where
        they are launched from Python."""
        self.num_draft_tokens = num_draft_tokens
        needs = parts.drafter.requirements
        self.max_drafted = parts.drafter.num_draft_tokens if needs.distinct_steps else num_draft_tokens
        if needs.on_host is not None:
            self.max_drafted = min(num_draft_tokens, needs.on_host.num_on_device)
        self.loop = make_draft_loop(parts, offered.num_going_on, recorder)
        self.offered = offered
        self._fixed_shapes = recorder is not None

    def mark(self, batch: RoundBatch) -> RoundBatch:
        offered = self.offered.of(batch.slot_ids, batch.active, self.num_draft_tokens)
        width = self.num_draft_tokens if self._fixed_shapes else int(offered.max())
        confidences = self.offered.confidences_of(batch.slot_ids, width)
        return replace(batch, input_ids=batch.input_ids[:, : width + 1], num_drafts=offered, confidences=confidences)

    def expect(self, slot_ids: torch.Tensor) -> None:
        self.offered.expect(slot_ids, self.max_drafted)

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.offered.num_drafted.index_select(0, slot_ids) if self.loop.decides_on_device else None


class CountedRows:
    """Offers of a part of a tree: `offered` says which rows count.

    Rows that are offered move to the front, so that a draw by a row's number is the same whether the others are there
    or not. A row that is not offered is its own parent, as one without a draft is, so no rule accepts it. Where nothing
    is captured, rows that nobody offers are left out.
    """

    def __init__(self, parts: Parts, offered: RowOffers, depth: int, recorder: GraphRecorder | None) -> None:
        """`recorder` as of `Counted`."""
        self.num_draft_tokens = self.max_drafted = depth
        self.loop = make_draft_loop(parts, offered.num_going_on, recorder)
        self.offered = offered
        self._fixed_shapes = recorder is not None

    def mark(self, batch: RoundBatch) -> RoundBatch:
        assert batch.parents is not None, "a round of trees marks its batches"
        is_offered = self.offered.of(batch.slot_ids, batch.active)
        num_rows = is_offered.sum(dim=1)
        width = is_offered.shape[1] if self._fixed_shapes else int(num_rows.max())
        tokens, parents = keep_rows(batch.input_ids, batch.parents, is_offered, width)
        depths = climb(parents, self.num_draft_tokens)[1].amax(dim=1)
        return replace(batch, input_ids=tokens, parents=parents, num_drafts=depths, num_draft_rows=num_rows)

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Do nothing: the drafter notes the rows of its trees."""

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.offered.num_drafted(slot_ids)
