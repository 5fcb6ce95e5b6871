"""FLy at temperature 0, where it is deterministic: the standing of drafts decides which of them it forgives."""

from __future__ import annotations

import torch

from spec_lab.acceptance.lossy import Window
from spec_lab.acceptance.standing import DraftStanding
from spec_lab.core.types import Request


class ForgivingJudge:
    """Judges drafts like FLy at temperature 0. It assumes that every token has a probability above 0."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: the text before a round does not matter."""

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """Do nothing, for the same reason."""

    def matches(self, standing: DraftStanding, slot_ids: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        assert standing.top_probabilities is not None, "recorded rows have top probabilities"
        behind = self._window.agreed(standing.is_top.float()) > 0
        return standing.is_top | (self._window.is_unsure(standing.top_probabilities) & behind)
