"""Prompt lookup drafts the continuation of the latest earlier occurrence of the longest matching suffix.

The idea is prompt-lookup decoding (apoorvumang 2023; vLLM's `ngram`); ours is a tensor search over the token history,
so that it needs no host copy of the tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import DraftStep, Request, VerifiedRound
from spec_lab.drafters.history import LookupState, NewTokens, TokenHistory, read_tokens, write_tokens
from spec_lab.drafters.picking import GivenDrafts

Found = TypeVar("Found")


class HistoryLookup(GivenDrafts, ABC, Generic[Found]):
    """Looks drafts up behind the text of each slot, which it keeps: all but what is found."""

    requirements = DrafterRequirements(has_loop=False)

    def __init__(self, num_draft_tokens: int, history: TokenHistory) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.history = history

    @abstractmethod
    def propose(self, new: NewTokens) -> Found:
        """Take the `new` tokens of some slots, and return the drafts behind them."""

    def admit(self, slot: int, request: Request) -> None:
        self.history.reset(slot, request.prompt_ids)

    def ingest(self, pack: PromptPack) -> Found | None:
        return None if pack.ends is None else self.propose(NewTokens.of_prompts(pack.ends))

    def catch_up(self, verified: VerifiedRound) -> Found:
        return self.propose(NewTokens.of_round(verified))


class LookUp(Protocol):
    """Extends histories, and looks up behind them: `extend_and_look_up`, or what does the same."""

    def __call__(
        self,
        texts: torch.Tensor,
        slot_ids: torch.Tensor,
        starts: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        max_ngram: int,
        min_ngram: int,
        num_draft_tokens: int,
    ) -> torch.Tensor: ...


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
    """Write new tokens to the texts of slots, and copy what followed the longest suffix when it last came before.

    Args:
        texts: [num_slots + 1, capacity], written at `slot_ids`; the last column is scratch.
        slot_ids: [batch], and the other fields of `NewTokens`; known texts end in front of the last column.

    Returns:
        Drafts [batch, num_draft_tokens]: 0 where nothing matches, and behind the end of the text.
    """
    write_tokens(texts, slot_ids, starts, tokens, counts)
    rows, lengths = texts.index_select(0, slot_ids), starts + counts
    start = torch.full_like(lengths, -1)
    for size in range(max_ngram, min_ngram - 1, -1):
        start = torch.where(start < 0, latest_match(rows, lengths, size), start)
    offsets = torch.arange(num_draft_tokens, device=start.device)
    known = (start.unsqueeze(1) >= 0) & (start.unsqueeze(1) + offsets < lengths.unsqueeze(1))
    return torch.where(known, read_tokens(rows, start, num_draft_tokens), 0)


class NgramDrafter(HistoryLookup[LookupState]):
    """Looks drafts up. Where nothing matches, or a match runs into the end, it drafts token 0: hardly ever accepted."""

    requirements = DrafterRequirements(draft_rest=LookupState.rest, has_loop=False)

    def __init__(
        self,
        num_draft_tokens: int,
        max_ngram: int,
        min_ngram: int,
        history: TokenHistory,
        look_up: LookUp = extend_and_look_up,
    ) -> None:
        super().__init__(num_draft_tokens, history)
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._look_up = look_up

    def step(self, state: LookupState, step: DraftStep) -> None:
        state.take(step)

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
