"""The confidence of a drafter in its drafts is the product of its top-1 probabilities, from draft 1 on.

It is that of the distribution, and not of the token that was drawn from it: to leave out a draft because its own
probability is small would keep that token from standing there, and bias what is emitted. What is known before a token
is drawn biases nothing (vLLM's estimator for adaptive verification, #47808, reads max q for the same reason).
"""

from __future__ import annotations

import torch


class DraftConfidences:
    """Keeps by slot how likely the drafter thinks it that the target follows it so far, [num_slots + 1, K].

    At fixed addresses and written by a column that is a tensor, so that one captured step can be replayed.

    Attributes:
        survival: at column i the product of the top-1 probabilities of drafts 1 to i + 1; it never grows along a row.
    """

    def __init__(self, num_slots: int, num_draft_tokens: int, device: torch.device) -> None:
        self.survival = torch.zeros((num_slots + 1, num_draft_tokens), device=device)
        self._running = torch.ones(num_slots + 1, device=device)

    def begin(self, slot_ids: torch.Tensor, probability: torch.Tensor) -> None:
        """Note the top-1 probability [batch] of draft 1 of `slot_ids` [batch]."""
        self._running.index_copy_(0, slot_ids, probability)
        self.survival[:, 0].index_copy_(0, slot_ids, probability)

    def go_on(self, slot_ids: torch.Tensor, probability: torch.Tensor, column: torch.Tensor) -> None:
        """Note that of the draft of `column` [1], from 0."""
        survival = self._running.index_select(0, slot_ids) * probability
        self._running.index_copy_(0, slot_ids, survival)
        self.survival.index_put_((slot_ids, column.expand_as(slot_ids)), survival)

    def of(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `slot_ids`, [batch, K]."""
        return self.survival.index_select(0, slot_ids)
