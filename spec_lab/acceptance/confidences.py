"""The confidence of a drafter in draft i of a chain: the product of its top-1 probabilities for drafts 1 to i.

A model with a confidence head gives the head's estimates instead. The top-1 probability is a property of the
distribution, known before a token is drawn from it. The drawn token's own probability must not decide whether the draft
is offered: unlikely tokens would be offered less often, which biases the output. vLLM's estimator for adaptive
verification (#47808) reads max q for the same reason.
"""

from __future__ import annotations

import torch

from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op


def note_confidence(
    survival: torch.Tensor,
    running: torch.Tensor,
    slot_ids: torch.Tensor,
    probabilities: torch.Tensor,
    column: torch.Tensor | None,
) -> None:
    """Multiply the running products of `slot_ids` by the top-1 probabilities [batch] of the newest drafts, and store
    them.

    `column` [1] is the index of the draft, from 0; None for index 0, which restarts the product. `running`
    [num_slots + 1] has the products, and `survival` is that of `DraftConfidences`.
    """
    if column is None:
        product = probabilities
        survival[:, 0].index_copy_(0, slot_ids, product)
    else:
        product = running.index_select(0, slot_ids) * probabilities
        survival.index_put_((slot_ids, column.expand_as(slot_ids)), product)
    running.index_copy_(0, slot_ids, product)


class DraftConfidences:
    """Stores for each slot how likely the target is to accept drafts 1 to i, as the drafter estimates it.

    The tensors stay at fixed addresses, and the column to write is a tensor too. So one captured draft step can be
    replayed for every draft.

    Attributes:
        survival: [num_slots + 1, K] column i is the product of the top-1 probabilities of drafts 1 to i + 1. Columns
            after a slot's drafts are stale.
        is_replayed: a rule writes recorded confidences, and those of the drafter are not stored.
    """

    def __init__(
        self, num_slots: int, num_draft_tokens: int, device: torch.device, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        self.survival = torch.zeros((num_slots + 1, num_draft_tokens), device=device)
        self.is_replayed = False
        self._running = torch.ones(num_slots + 1, device=device)
        self._note = kernels.get(Op.NOTE_CONFIDENCE, note_confidence)

    def note(self, slot_ids: torch.Tensor, probability: torch.Tensor, column: torch.Tensor | None = None) -> None:
        """Store the top-1 probability [batch] of the drafts of `slot_ids` [batch] at `column` [1], from 0; None for
        draft 1."""
        if not self.is_replayed:
            self._note(self.survival, self._running, slot_ids, probability, column)

    def of(self, slot_ids: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Copy the survival [batch, num_drafts] of the first drafts of `slot_ids` [batch]."""
        return self.survival.index_select(0, slot_ids)[:, :num_drafts]
