"""The tokens of each slot are kept on the device, for drafters that look drafts up instead of running a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.types import DraftStep, VerifiedRound


@dataclass(slots=True)
class LookupState:
    """Holds the newest draft `tokens` [batch], and all drafts of the round, `proposals` [batch, num_draft_tokens]."""

    tokens: torch.Tensor
    proposals: torch.Tensor
    attention: None = None

    def take(self, step: DraftStep) -> None:
        self.tokens = self.proposals.index_select(1, step.column).squeeze(1)

    def rest(self) -> torch.Tensor:
        """Return all drafts of the round: there is no loop to run."""
        return self.proposals


class TokenHistory:
    """Keeps the tokens of each slot by position, [num_slots + 1, capacity]; the last row is the scratch slot's."""

    def __init__(self, num_slots: int, capacity: int, device: torch.device) -> None:
        self.tokens = torch.zeros((num_slots + 1, capacity), dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    def reset(self, slot: int, token_ids: list[int] | tuple[int, ...]) -> None:
        """Replace the whole row of `slot`."""
        self.tokens[slot].zero_()
        kept = token_ids[: self.capacity]
        self.tokens[slot, : len(kept)] = torch.tensor(kept, dtype=torch.int64)

    def append(self, verified: VerifiedRound) -> None:
        """Write the emitted tokens of a round at positions L+1..L+n; rejected ones rewrite what stands there."""
        batch, emitted = verified.batch, verified.verification
        offsets = torch.arange(emitted.tokens.shape[1], device=self.tokens.device)
        positions = (batch.kv_lens.unsqueeze(1) + 1 + offsets).clamp_(max=self.capacity - 1)
        rows = self.tokens.index_select(0, batch.slot_ids)
        keep = (offsets < emitted.num_emitted.unsqueeze(1)) & (positions < self.capacity - 1)
        # Positions clamped onto the last column repeat there; it is scratch and never read as a token.
        rows.scatter_(1, positions, torch.where(keep, emitted.tokens, rows.gather(1, positions)))
        self.tokens.index_copy_(0, batch.slot_ids, rows)

    def gather(self, slot_ids: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
        """Return [batch, count] tokens from position `start` [batch] on; 0 past the capacity."""
        positions = start.unsqueeze(1) + torch.arange(count, device=start.device)
        tokens = self.tokens.index_select(0, slot_ids).gather(1, positions.clamp(0, self.capacity - 1))
        return torch.where(positions < self.capacity, tokens, 0)
