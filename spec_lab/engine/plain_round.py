"""A round without drafts, for requests that do not draft: plain decoding in a drafter's slots and caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from spec_lab.core.types import FeatureSpec, RoundBatch, VerifiedRound
from spec_lab.engine.drafts import Drafts
from spec_lab.engine.parts import Parts
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.stopping_loop import DraftLoop, EveryStep


class NoneOffered:
    """Nothing is drafted or offered, and a request has one row."""

    num_draft_tokens = max_drafted = 0

    def __init__(self) -> None:
        self.loop: DraftLoop = EveryStep(looks_between=True)

    def mark(self, batch: RoundBatch) -> RoundBatch:
        return replace(batch, input_ids=batch.input_ids[:, :1])

    def expect(self, slot_ids: torch.Tensor) -> None:
        """Do nothing: drafts left in a slot are not offered again."""

    def made(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return None


@dataclass(slots=True)
class _Nothing:
    """The state of a drafter that did not run."""

    tokens: torch.Tensor
    attention: None = None


class PlainRound(DecodeRound):
    """Leaves out the drafter: its features, catch-up and steps. So the drafter cannot resume for these requests."""

    catches_up = False

    def __init__(self, parts: Parts, drafts: Drafts) -> None:
        super().__init__(parts, drafts, NoneOffered())

    @property
    def features(self) -> FeatureSpec:
        return FeatureSpec()

    def catch_up(self, verified: VerifiedRound) -> Any:
        return _Nothing(verified.verification.tokens[:, 0])
