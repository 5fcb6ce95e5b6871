"""A round that verifies no drafts: plain decoding in a drafter's slots and caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.core.types import FeatureSpec, VerifiedRound
from spec_lab.engine.drafts import Drafts
from spec_lab.engine.missed_rows import MissedRows
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.offers import Offers
from spec_lab.engine.parts import Parts
from spec_lab.engine.round import DecodeRound


@dataclass(slots=True)
class _Nothing:
    """The state of a drafter that did not run."""

    tokens: torch.Tensor
    attention: None = None


class PlainRound(DecodeRound):
    """Leaves out the drafter, or lets it catch up with all rounds that it missed, this one included, and draft.

    Without a place for what it misses, the drafter cannot resume for these requests.
    """

    def __init__(
        self,
        parts: Parts,
        drafts: Drafts,
        offered: DraftOffers,
        missed: MissedRows | None = None,
        num_made: int = 0,
        confidences: DraftConfidences | None = None,
    ) -> None:
        assert missed is not None or num_made == 0
        super().__init__(parts, drafts, Offers(0, num_made, offered, confidences, is_full=True))
        self._missed = missed
        self.num_catchup_rows = missed.size if missed is not None and num_made else 0

    @property
    def features(self) -> FeatureSpec:
        return FeatureSpec() if self._missed is None else super().features

    def catch_up(self, verified: VerifiedRound) -> Any:
        if self._missed is not None:
            self._missed.keep(verified)
            if self.offers.max_drafted:
                return super().catch_up(self._missed.take(verified))
        self.offers.expect(verified.batch.slot_ids)
        return _Nothing(verified.verification.tokens[:, 0])
