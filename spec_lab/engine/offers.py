"""Decides which drafts a round may accept: all of them, or only those that each request offers."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.core.types import RoundBatch
from spec_lab.engine.offered import DraftOffers


class Offers(Protocol):
    """Decides how many drafts each request offers for verification.

    Attributes:
        num_draft_tokens: K, the most drafts of a request that one round can accept.
        max_drafted: the drafts that the device makes for a request; for a tree, the levels.
    """

    num_draft_tokens: int
    max_drafted: int

    def mark(self, batch: RoundBatch) -> RoundBatch:
        """Add to `batch` how many drafts each request offers, and remove rows that no request offers."""
        ...

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Record that drafts for `slot_ids` [batch] are about to be made."""
        ...

    def made_confidences(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the drafter's confidences [batch, drafts] in the drafts that were made, if the host reads them."""
        ...


class AllOffered:
    """Every draft is offered."""

    def __init__(self, num_draft_tokens: int, confidences: DraftConfidences | None = None) -> None:
        """`confidences`: those of the drafts, which the record keeps."""
        self.num_draft_tokens = self.max_drafted = num_draft_tokens
        self._confidences = confidences

    def mark(self, batch: RoundBatch) -> RoundBatch:
        kept = self._confidences
        return batch if kept is None else replace(batch, confidences=kept.of(batch.slot_ids, self.num_draft_tokens))

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Do nothing: the number of drafts is fixed."""

    def made_confidences(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return None


class Counted:
    """Each request offers the first drafts of its chain; `offered` counts them, up to K.

    A round has rows for K drafts. A draft that is not offered is then verified like any other, but never accepted.
    """

    def __init__(
        self,
        offered: DraftOffers,
        num_draft_tokens: int,
        num_made: int,
        confidences: DraftConfidences | None = None,
        is_full: bool = False,
    ) -> None:
        """Set the numbers.

        Args:
            num_made: the drafts that the device makes for the next round.
            is_full: every request has K drafts to offer.
        """
        self.num_draft_tokens = num_draft_tokens
        self.max_drafted = num_made
        self._offered = offered
        self._confidences = confidences
        self._is_full = is_full

    def mark(self, batch: RoundBatch) -> RoundBatch:
        most, kept = self.num_draft_tokens, self._confidences
        offered = None if self._is_full else self._offered.of(batch.slot_ids, batch.active, most)
        confidences = None if kept is None else kept.of(batch.slot_ids, most)
        return replace(batch, input_ids=batch.input_ids[:, : most + 1], num_drafts=offered, confidences=confidences)

    def expect(self, slot_ids: torch.Tensor) -> None:
        self._offered.expect(slot_ids, self.max_drafted)

    def made_confidences(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return None if self._confidences is None else self._confidences.of(slot_ids, self.max_drafted)
