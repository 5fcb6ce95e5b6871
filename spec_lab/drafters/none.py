"""Plain decoding: nothing is drafted, and a round has one row for each request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements, HostDrafter
from spec_lab.core.types import DraftStep, Request, VerifiedRound
from spec_lab.drafters.picking import GivenDrafts


@dataclass(slots=True)
class NoDraftState:
    """The state of plain decoding, which drafts nothing."""

    tokens: torch.Tensor
    attention: None = None


class NoDrafter(GivenDrafts):
    """A drafter that drafts nothing, at least not on the device."""

    def __init__(self, num_draft_tokens: int = 0, on_host: HostDrafter | None = None) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.requirements = DrafterRequirements(has_loop=False, on_host=on_host)

    def admit(self, slot: int, request: Request) -> None:
        pass

    def ingest(self, pack: PromptPack) -> NoDraftState | None:
        return None if pack.ends is None else NoDraftState(pack.ends.tokens)

    def catch_up(self, verified: VerifiedRound) -> NoDraftState:
        return NoDraftState(verified.verification.tokens[:, 0])

    def step(self, state: NoDraftState, step: DraftStep) -> None:
        raise AssertionError("a drafter without drafts takes no step")
