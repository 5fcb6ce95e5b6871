"""Decides which drafts a round may accept: all of them, or only those that each request offers."""

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
    """Decides how many drafts each request offers for verification, and when drafting stops.

    Attributes:
        num_draft_tokens: K, the most drafts of a request that one round can accept.
        max_drafted: the most drafts that the device makes for a request; for a tree, the most levels.
        loop: decides which draft steps run.
    """

    num_draft_tokens: int
    max_drafted: int
    loop: DraftLoop

    def mark(self, batch: RoundBatch) -> RoundBatch:
        """Add to `batch` how many drafts each request offers. Remove rows that no request offers, if shapes may
        change."""
        ...

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Record that drafts for `slot_ids` [batch] are about to be made."""
        ...

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return how many drafts [batch] were made, if only the device knows it; else None."""
        ...


class AllOffered:
    """Every draft is offered."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = self.max_drafted = num_draft_tokens
        self.loop: DraftLoop = EveryStep()

    def mark(self, batch: RoundBatch) -> RoundBatch:
        return batch

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Do nothing: the number of drafts is fixed."""

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return None


class Counted:
    """Each request offers the first drafts of its chain; `offered` counts them, up to K.

    In a captured mode shapes always have room for K drafts. A draft that is not offered is then verified like any
    other, but never accepted. Without capture, rows that no request offers are left out.
    """

    def __init__(
        self, parts: Parts, offered: DraftOffers, num_draft_tokens: int, recorder: GraphRecorder | None
    ) -> None:
        """`recorder`: captures the stages, so the host reads nothing within a round, and every round has all rows; None
        for eager launches."""
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
        return None


class CountedRows:
    """Each request offers some rows of its tree, which `offered` selects.

    Offered rows move to the front. Random draws are keyed by the row number there, so the rows behind do not change
    them. A row that is not offered becomes its own parent, like a row without a draft, so no rule accepts it. Without
    capture, rows that no request offers are left out.
    """

    def __init__(self, parts: Parts, offered: RowOffers, depth: int, recorder: GraphRecorder | None) -> None:
        """`recorder`: as in `Counted`."""
        self.num_draft_tokens = self.max_drafted = depth
        self.loop = make_draft_loop(parts, offered.num_going_on, recorder)
        self.offered = offered
        self._fixed_shapes = recorder is not None

    def mark(self, batch: RoundBatch) -> RoundBatch:
        assert batch.parents is not None, "Tree.mark sets the parents first"
        is_offered = self.offered.of(batch.slot_ids, batch.active)
        num_rows = is_offered.sum(dim=1)
        width = is_offered.shape[1] if self._fixed_shapes else int(num_rows.max())
        tokens, parents = keep_rows(batch.input_ids, batch.parents, is_offered, width)
        depths = climb(parents, self.num_draft_tokens)[1].amax(dim=1)
        return replace(batch, input_ids=tokens, parents=parents, num_drafts=depths, num_draft_rows=num_rows)

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Do nothing: the drafter records the rows of its trees."""

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.offered.num_drafted(slot_ids)
