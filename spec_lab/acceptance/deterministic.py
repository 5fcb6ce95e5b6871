"""The protocol of deterministic acceptance rules. They draw no random numbers, and judge drafts by `DraftStanding`."""

from __future__ import annotations

from typing import Protocol

import torch

from spec_lab.acceptance.standing import DraftStanding
from spec_lab.core.types import Request


class DraftJudge(Protocol):
    """Judges drafts on recorded verify rows, outside the run that recorded them."""

    def admit(self, slot: int, request: Request) -> None:
        """Set the slot's state for a new request."""
        ...

    def matches(self, standing: DraftStanding, slot_ids: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Return bool [batch, K]: whether each draft would be accepted if all drafts before it were."""
        ...

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """Update the slots' state with the emitted tokens: the first `num_emitted` [batch] of `tokens` [batch, N]."""
        ...
