"""What a slot of a block drafts, as whoever picks tokens reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.models.scored_tokens import top_probability


@dataclass(frozen=True, slots=True)
class SlotScores:
    """Keeps the protocol `DraftHead` for a slot that has been scored, so that what it is read from says nothing more.

    Attributes:
        scores: [batch, scored] logits of the slot's law, whatever a head has added.
        ids: [scored] or [batch, scored] tokens that are scored, in target ids; None where they are the whole
            vocabulary.
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

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, vocab], -inf where a token is not scored."""
        if self.ids is None:
            return self.scores
        logits = self.scores.new_full((self.scores.shape[0], self.vocab_size), float("-inf"))
        return logits.scatter_(1, self.ids.expand_as(self.scores), self.scores)
