"""Prompt lookup drafts the continuation of the latest earlier occurrence of the longest matching suffix.

The idea is prompt-lookup decoding (apoorvumang 2023; vLLM's `ngram`); ours is a tensor search over the token history,
so that it needs no host copy of the tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import DraftStep, Request, VerifiedRound
from spec_lab.drafters.history import LookupState, TokenHistory
from spec_lab.drafters.picking import GivenDrafts

Found = TypeVar("Found")


class HistoryLookup(GivenDrafts, ABC, Generic[Found]):
    """Keeps the text of each slot, and looks drafts up behind it: all but what is found."""

    requirements = DrafterRequirements()

    def __init__(self, num_draft_tokens: int, history: TokenHistory) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.history = history

    @abstractmethod
    def propose(self, slot_ids: torch.Tensor, lengths: torch.Tensor) -> Found:
        """Return the drafts after the `lengths` [batch] known tokens of each slot."""

    def admit(self, slot: int, request: Request) -> None:
        self.history.reset(slot, request.prompt_ids)

    def ingest(self, pack: PromptPack) -> Found | None:
        ends = pack.ends
        if ends is None:
            return None
        self.history.tokens[ends.slot_ids, ends.kv_lens] = ends.tokens
        return self.propose(ends.slot_ids, ends.kv_lens + 1)

    def catch_up(self, verified: VerifiedRound) -> Found:
        self.history.append(verified)
        lengths = verified.batch.kv_lens + verified.verification.num_emitted + 1
        return self.propose(verified.batch.slot_ids, lengths)


class NgramDrafter(HistoryLookup[LookupState]):
    """Looks drafts up. Where nothing matches, or a match runs into the end, it drafts token 0: hardly ever accepted."""

    requirements = DrafterRequirements(draft_rest=LookupState.rest)

    def __init__(self, num_draft_tokens: int, max_ngram: int, min_ngram: int, history: TokenHistory) -> None:
        super().__init__(num_draft_tokens, history)
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    def step(self, state: LookupState, step: DraftStep) -> None:
        state.take(step)

    def propose(self, slot_ids: torch.Tensor, lengths: torch.Tensor) -> LookupState:
        tokens = self.history.tokens.index_select(0, slot_ids)
        start = torch.full_like(lengths, -1)
        for size in self.sizes:
            found = latest_match(tokens, lengths, size)
            start = torch.where(start < 0, found, start)
        proposals = self.history.gather(slot_ids, start, self.num_draft_tokens)
        offsets = torch.arange(self.num_draft_tokens, device=start.device)
        known = (start.unsqueeze(1) >= 0) & (start.unsqueeze(1) + offsets < lengths.unsqueeze(1))
        proposals = torch.where(known, proposals, 0)
        return LookupState(proposals[:, 0], proposals)


def latest_match(tokens: torch.Tensor, lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Return the position after the latest earlier occurrence of each row's last `size` tokens, -1 where there is none.

    Args:
        tokens: [batch, capacity]; lengths: [batch] known tokens of each row.
    """
    if tokens.shape[1] <= size:
        return torch.full_like(lengths, -1)
    windows = tokens.unfold(1, size, 1)
    suffix_positions = (lengths - size).unsqueeze(1) + torch.arange(size, device=tokens.device)
    suffix = tokens.gather(1, suffix_positions.clamp(min=0, max=tokens.shape[1] - 1))
    starts = torch.arange(windows.shape[1], device=tokens.device)
    # The suffix itself starts at length - size: an earlier occurrence starts before it.
    matches = (windows == suffix.unsqueeze(1)).all(-1) & (starts < (lengths - size).unsqueeze(1))
    return torch.where(matches, starts + size, -1).amax(dim=1)
