"""The scores of a block's slot, as a draft head for pickers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.models.scored_tokens import ScoredTokens, top_probability


@dataclass(frozen=True, slots=True)
class SlotScores:
    """A `DraftHead` and `BranchHead` of a slot whose scores are already computed, so its methods ignore `hidden`.

    Attributes:
        scores: [rows, scored] the slot's logits, including the terms of the head. There is a row for each request, or
            for each branch of a tree.
        ids: [scored] or [rows, scored] the tokens that are scored, in target ids; None for the whole vocabulary.
    """

    scores: torch.Tensor
    ids: torch.Tensor | None
    vocab_size: int

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        best = self.scores.argmax(dim=-1)
        if self.ids is None:
            return best
        return self.ids.expand_as(self.scores).gather(1, best.unsqueeze(1)).squeeze(1)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.greedy(hidden), top_probability(self.scores)

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        return ScoredTokens(self.scores, self.ids)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab], -inf for tokens that are not scored."""
        if self.ids is None:
            return self.scores
        logits = self.scores.new_full((self.scores.shape[0], self.vocab_size), float("-inf"))
        return logits.scatter_(1, self.ids.expand_as(self.scores), self.scores)
