"""Keeps the tokens of each slot on the device, for drafters that look up drafts instead of running a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.prompts import PromptEnds
from spec_lab.core.types import DraftStep, VerifiedRound
from spec_lab.drafters.picking import GivenDrafts


@dataclass(slots=True)
class LookupState:
    """The newest draft `tokens` [batch], and all drafts of the round, `proposals` [batch, num_draft_tokens]."""

    tokens: torch.Tensor
    proposals: torch.Tensor
    attention: None = None


class FoundDrafts(GivenDrafts):
    """Takes drafts from a `LookupState`: one by one, or the first ones at once, so that no draft loop runs."""

    def step(self, state: LookupState, step: DraftStep) -> None:
        state.tokens = state.proposals.index_select(1, step.column).squeeze(1)

    def draft_rest(self, state: LookupState, num_drafts: int) -> torch.Tensor:
        return state.proposals[:, :num_drafts]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of texts: the first `counts` [batch] of `tokens` [batch, width], from position `starts` [batch] on.

    Padded rows have a count of 0 and share the scratch slot.
    """

    slot_ids: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of_round(cls, verified: VerifiedRound) -> NewTokens:
        """Return the emitted tokens of a round, at positions L+1..L+n."""
        batch, emitted = verified.batch, verified.verification
        return cls(batch.slot_ids, batch.kv_lens + 1, emitted.tokens, emitted.num_emitted)

    @classmethod
    def of_prompts(cls, ends: PromptEnds) -> NewTokens:
        """Return the first token after each prompt."""
        return cls(ends.slot_ids, ends.kv_lens, ends.tokens.unsqueeze(1), torch.ones_like(ends.kv_lens))

    @property
    def ends(self) -> torch.Tensor:
        """Return the number of known tokens of each text [batch] once these are added."""
        return self.starts + self.counts


class TokenHistory:
    """The tokens of each slot by position, [num_slots + 1, capacity]; the last row is the scratch slot's."""

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


def write_tokens(
    texts: torch.Tensor, slot_ids: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """Write the fields of `NewTokens` to `texts` [num_slots + 1, capacity], whose last column is scratch."""
    capacity = texts.shape[1]
    offsets = torch.arange(tokens.shape[1], device=texts.device)
    positions = (starts.unsqueeze(1) + offsets).clamp_(max=capacity - 1)
    rows = texts.index_select(0, slot_ids)
    keep = (offsets < counts.unsqueeze(1)) & (positions < capacity - 1)
    # Later positions are clamped to the last column, which can then occur twice. So no token is written to it.
    rows.scatter_(1, positions, torch.where(keep, tokens, rows.gather(1, positions)))
    texts.index_copy_(0, slot_ids, rows)


def read_tokens(rows: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
    """Return [batch, count] tokens of `rows` [batch, capacity] from `start` [batch] on; 0 past the capacity."""
    positions = start.unsqueeze(1) + torch.arange(count, device=start.device)
    tokens = rows.gather(1, positions.clamp(0, rows.shape[1] - 1))
    return torch.where(positions < rows.shape[1], tokens, 0)
