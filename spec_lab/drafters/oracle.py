"""The oracle, an upper bound: it drafts the recorded output of plain decoding. It works with strict acceptance only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import Request, VerifiedRound
from spec_lab.drafters.history import FoundDrafts, LookupState, TokenHistory, read_tokens


class OracleDrafter(FoundDrafts):
    """A drafter that knows each request's whole text; past its end it drafts token 0."""

    requirements = DrafterRequirements(learns_continuations=True, drafts_rest=True, has_loop=False)

    def __init__(self, num_draft_tokens: int, history: TokenHistory) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.history = history
        self._continuations: Mapping[str, Sequence[int]] = {}

    def learn(self, continuations: Mapping[str, Sequence[int]]) -> None:
        """Store output tokens of plain decoding, by request id."""
        self._continuations = continuations

    def admit(self, slot: int, request: Request) -> None:
        self.history.reset(slot, (*request.prompt_ids, *self._continuations[request.request_id]))

    def ingest(self, pack: PromptPack) -> LookupState | None:
        return None if pack.ends is None else self._propose(pack.ends.slot_ids, pack.ends.kv_lens + 1)

    def catch_up(self, verified: VerifiedRound) -> LookupState:
        lengths = verified.batch.kv_lens + verified.verification.num_emitted + 1
        return self._propose(verified.batch.slot_ids, lengths)

    def _propose(self, slot_ids: torch.Tensor, lengths: torch.Tensor) -> LookupState:
        proposals = read_tokens(self.history.tokens.index_select(0, slot_ids), lengths, self.num_draft_tokens)
        return LookupState(proposals[:, 0], proposals)
