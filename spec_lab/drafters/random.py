"""The lower bound: uniform random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import PromptChunk, Request, VerifiedRound


@dataclass(slots=True)
class RandomState:
    tokens: torch.Tensor


class RandomDrafter:
    """See `Drafter`."""

    requirements = DrafterRequirements()

    def __init__(self, num_draft_tokens: int, vocab_size: int, seed: int, device: torch.device) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._vocab_size = vocab_size
        self._generator = torch.Generator(device).manual_seed(seed)

    def admit(self, slot: int, request: Request) -> None:
        pass

    def ingest(self, chunk: PromptChunk) -> RandomState | None:
        return None if chunk.live_attention is None else RandomState(self._draw(1))

    def seed(self, verified: VerifiedRound) -> RandomState:
        return RandomState(self._draw(verified.batch.num_rows))

    def step(self, state: RandomState, index: int) -> None:
        state.tokens = self._draw(state.tokens.shape[0])

    def _draw(self, batch_size: int) -> torch.Tensor:
        device = self._generator.device
        return torch.randint(self._vocab_size, (batch_size,), generator=self._generator, device=device)
