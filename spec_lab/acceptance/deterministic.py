"""Rules that decide without drawing need to know no more than the standing of the drafts."""

from __future__ import annotations

from typing import Protocol

import torch

from spec_lab.acceptance.standing import DraftStanding
from spec_lab.core.protocols import AcceptanceRule
from spec_lab.core.types import Request


class DraftJudge(Protocol):
    """Judges drafts on recorded verify rows, without the run that wrote them."""

    def admit(self, slot: int, request: Request) -> None:
        """Set the slot's state from the whole prompt."""
        ...

    def matches(self, standing: DraftStanding, slot_ids: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Say of each draft [batch, K] whether it would be accepted if it were reached."""
        ...

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """Take the first `num_emitted` [batch] of `tokens` [batch, N] as the text that follows."""
        ...


class DeterministicRule(AcceptanceRule, DraftJudge, Protocol):
    """A rule that can be re-scored, and runs as well."""
