"""Prompt lookup: finds the latest earlier occurrence of the longest matching suffix, and drafts the tokens after it.

The idea is prompt-lookup decoding (apoorvumang 2023; vLLM's `ngram`). Here it is a tensor search over the token history
on the device, so the host needs no copy of the tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import Request, VerifiedRound
from spec_lab.drafters.history import FoundDrafts, LookupState, NewTokens, TokenHistory, read_tokens, write_tokens
from spec_lab.drafters.picking import GivenDrafts

Found = TypeVar("Found")


class HistoryLookup(GivenDrafts, ABC, Generic[Found]):
    """The common part of lookup drafters: it keeps the text of each slot. A subclass proposes drafts."""

    requirements = DrafterRequirements(has_loop=False)

    def __init__(self, num_draft_tokens: int, history: TokenHistory) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.history = history

    @abstractmethod
    def propose(self, new: NewTokens) -> Found:
        """Append the `new` tokens of some slots, and return drafts to follow them."""

    def admit(self, slot: int, request: Request) -> None:
        self.history.reset(slot, request.prompt_ids)

    def ingest(self, pack: PromptPack) -> Found | None:
        return None if pack.ends is None else self.propose(NewTokens.of_prompts(pack.ends))

    def catch_up(self, verified: VerifiedRound) -> Found:
        return self.propose(NewTokens.of_round(verified))


def extend_and_look_up(
    texts: torch.Tensor,
    slot_ids: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
    num_draft_tokens: int,
) -> torch.Tensor:
    """Write new tokens to the texts of slots, and look up drafts.

    Drafts are the tokens after the latest earlier occurrence of the longest matching suffix.

    Args:
        texts: [num_slots + 1, capacity], written at `slot_ids`. The last column is scratch, and known texts end before
            it.
        slot_ids: [batch]; this and the next three are the fields of `NewTokens`.

    Returns:
        Drafts [batch, num_draft_tokens]: 0 if nothing matches, and past the end of the text.
    """
    write_tokens(texts, slot_ids, starts, tokens, counts)
    rows, lengths = texts.index_select(0, slot_ids), starts + counts
    start = torch.full_like(lengths, -1)
    for size in range(max_ngram, min_ngram - 1, -1):
        start = torch.where(start < 0, latest_match(rows, lengths, size), start)
    offsets = torch.arange(num_draft_tokens, device=start.device)
    known = (start.unsqueeze(1) >= 0) & (start.unsqueeze(1) + offsets < lengths.unsqueeze(1))
    return torch.where(known, read_tokens(rows, start, num_draft_tokens), 0)


class NgramDrafter(FoundDrafts, HistoryLookup[LookupState]):
    """Looks up a chain of drafts. Missing drafts are token 0, which is hardly ever accepted."""

    requirements = DrafterRequirements(drafts_rest=True, has_loop=False)

    def __init__(
        self,
        num_draft_tokens: int,
        max_ngram: int,
        min_ngram: int,
        history: TokenHistory,
        look_up: Callable[..., torch.Tensor] = extend_and_look_up,
    ) -> None:
        super().__init__(num_draft_tokens, history)
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._look_up = look_up

    def propose(self, new: NewTokens) -> LookupState:
        proposals = self._look_up(
            self.history.tokens,
            new.slot_ids,
            new.starts,
            new.tokens,
            new.counts,
            self._max_ngram,
            self._min_ngram,
            self.num_draft_tokens,
        )
        return LookupState(proposals[:, 0], proposals)


def latest_match(tokens: torch.Tensor, lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Return the position after the latest earlier occurrence of each row's last `size` tokens; -1 if there is none.

    Args:
        tokens: [batch, capacity]; lengths: [batch] known tokens of each row.
    """
    if tokens.shape[1] <= size:
        return torch.full_like(lengths, -1)
    windows = tokens.unfold(1, size, 1)
    suffix_positions = (lengths - size).unsqueeze(1) + torch.arange(size, device=tokens.device)
    suffix = tokens.gather(1, suffix_positions.clamp(min=0, max=tokens.shape[1] - 1))
    starts = torch.arange(windows.shape[1], device=tokens.device)
    # An earlier occurrence starts before the suffix itself, which starts at length - size.
    matches = (windows == suffix.unsqueeze(1)).all(-1) & (starts < (lengths - size).unsqueeze(1))
    return torch.where(matches, starts + size, -1).amax(dim=1)
