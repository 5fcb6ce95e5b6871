"""Plain decoding: nothing is drafted, and a round has one row for each request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import DraftStep, Request, VerifiedRound
from spec_lab.drafters.picking import GivenDrafts


@dataclass(slots=True)
class NoDraftState:
    """The state of plain decoding, which drafts nothing."""

    tokens: torch.Tensor
    attention: None = None


class NoDrafter(GivenDrafts):
    """A drafter that drafts nothing."""

    num_draft_tokens = 0
    requirements = DrafterRequirements(has_loop=False)

    def admit(self, slot: int, request: Request) -> None:
        pass

    def ingest(self, pack: PromptPack) -> NoDraftState | None:
        return None if pack.ends is None else NoDraftState(pack.ends.tokens)

    def catch_up(self, verified: VerifiedRound) -> NoDraftState:
        return NoDraftState(verified.verification.tokens[:, 0])

    def step(self, state: NoDraftState, step: DraftStep) -> None:
        raise AssertionError("a drafter without drafts takes no step")
