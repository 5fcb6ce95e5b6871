"""Decides which drafts a round may accept: all of them, or only those that each request offers."""

from __future__ import annotations

from dataclasses import replace

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.core.types import RoundBatch
from spec_lab.engine.offered import DraftOffers


class Offers:
    """Decides how many drafts each request offers for verification: all of them, or the first ones of its chain.

    A round has rows for K drafts. A draft that is not offered is then verified like any other, but never accepted.

    Attributes:
        num_draft_tokens: K, the most drafts of a request that one round can accept.
        max_drafted: the drafts that the device makes for the next round; for a tree, the levels.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        num_made: int,
        counts: DraftOffers | None = None,
        confidences: DraftConfidences | None = None,
        is_full: bool = False,
    ) -> None:
        """Set the numbers.

        Args:
            counts: how many drafts each slot offers; None if always all that were made.
            confidences: those of the drafts, which the record keeps.
            is_full: every request has K drafts to offer.
        """
        self.num_draft_tokens = num_draft_tokens
        self.max_drafted = num_made
        self._counts = counts
        self._confidences = confidences
        self._is_full = is_full

    def mark(self, batch: RoundBatch) -> RoundBatch:
        """Add to `batch` how many drafts each request offers, and remove rows that no request offers."""
        most, kept = self.num_draft_tokens, self._confidences
        if self._counts is not None:
            offered = None if self._is_full else self._counts.of(batch.slot_ids, batch.active, most)
            batch = replace(batch, input_ids=batch.input_ids[:, : most + 1], num_drafts=offered)
        return batch if kept is None or not most else replace(batch, confidences=kept.of(batch.slot_ids, most))

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Record that drafts for `slot_ids` [batch] are about to be made. Those made before are not offered again."""
        if self._counts is not None:
            self._counts.expect(slot_ids, self.max_drafted)

    def made_confidences(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the drafter's confidences [batch, drafts] in the drafts that were made, if the host reads them."""
        if self._counts is None or self._confidences is None:
            return None
        return self._confidences.of(slot_ids, self.max_drafted)
