"""Drafts uniform random tokens, as a lower bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.noise_reference import Use, round_key, uniform
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import DraftStep, Request, VerifiedRound
from spec_lab.drafters.picking import DraftedRows, GivenDrafts


@dataclass(slots=True)
class RandomState:
    """The newest drafts; draft steps change no metadata."""

    tokens: torch.Tensor
    rows: DraftedRows
    attention: None = None


class RandomDrafter(GivenDrafts):
    """Draws drafts with noise keyed by request, L and draft, so a draft does not depend on other requests."""

    requirements = DrafterRequirements()

    def __init__(self, num_draft_tokens: int, vocab_size: int, seeds: SlotSeeds) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._vocab_size = vocab_size
        self.seeds = seeds

    def admit(self, slot: int, request: Request) -> None:
        self.seeds.admit(slot, request)

    def ingest(self, pack: PromptPack) -> RandomState | None:
        return None if pack.ends is None else self._start(DraftedRows.of_prompts(pack.ends))

    def catch_up(self, verified: VerifiedRound) -> RandomState:
        batch = verified.batch
        return self._start(DraftedRows(batch.slot_ids, batch.kv_lens + verified.verification.num_emitted))

    def step(self, state: RandomState, step: DraftStep) -> None:
        state.tokens = self._draw(state.rows, step.column)

    def _start(self, rows: DraftedRows) -> RandomState:
        return RandomState(self._draw(rows, 0), rows)

    def _draw(self, rows: DraftedRows, step: int | torch.Tensor) -> torch.Tensor:
        draws = uniform(round_key(self.seeds.of(rows.slot_ids), rows.kv_lens, step, Use.DRAFT))
        return (draws * self._vocab_size).long()
