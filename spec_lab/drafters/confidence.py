"""Pickers that store the drafter's confidence in each draft, which decides how many drafts are offered."""

from __future__ import annotations

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.drafters.picking import DraftedRows, DraftHead, DraftPicker, GivenDrafts
from spec_lab.models.scored_tokens import top_probability


class ConfidentGreedyPicker(GivenDrafts):
    """Picks the likeliest token, and stores its probability."""

    takes_likeliest = False

    def __init__(self, confidences: DraftConfidences) -> None:
        self._confidences = confidences

    def pick(
        self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows, column: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens, probabilities = head.greedy_with_probability(hidden)
        self._confidences.note(rows.slot_ids, probabilities, column)
        return tokens


class ConfidentPicker:
    """Wraps a picker: computes the logits once, and stores their top-1 probability at temperature 1."""

    takes_likeliest = False

    def __init__(self, picker: DraftPicker, confidences: DraftConfidences) -> None:
        self._picker = picker
        self._confidences = confidences

    def pick(
        self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows, column: torch.Tensor | None = None
    ) -> torch.Tensor:
        scored = ScoredHead(head.target_logits(hidden))
        self._confidences.note(rows.slot_ids, scored.top_probability(), column)
        return self._picker.pick(scored, hidden, rows, column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self._picker.kept_logits(slot_ids)


class ScoredHead:
    """A draft head for one output whose logits [batch, vocab] are already computed."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.argmax(dim=-1)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.greedy(hidden), self.top_probability()

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits

    def top_probability(self) -> torch.Tensor:
        """Return the largest probability [batch]."""
        return top_probability(self._logits)
