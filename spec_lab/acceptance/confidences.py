"""The confidence of a drafter in its drafts is the product of its top-1 probabilities, from draft 1 on.

It is that of the distribution, and not of the token that was drawn from it: to leave out a draft because its own
probability is small would keep that token from standing there, and bias what is emitted. What is known before a token
is drawn biases nothing (vLLM's estimator for adaptive verification, #47808, reads max q for the same reason).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spec_kernels.confidence_reference import note_confidence_reference

NoteConfidence = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        float | None,
    ],
    None,
]
"""Is `spec_kernels.confidence_reference.note_confidence_reference`, or a kernel that does the same."""


class DraftConfidences:
    """Keeps by slot how likely the drafter thinks it that the target follows it so far, [num_slots + 1, K].

    At fixed addresses and written by a column that is a tensor, so that one captured step can be replayed.

    Attributes:
        survival: at column i the product of the top-1 probabilities of drafts 1 to i + 1; it never grows along a row.
        num_drafted: [num_slots + 1] drafts that wait in a slot.
        num_going_on: [1] requests of the batch noted last that want a draft behind that one; the scratch slot never
            does. Written where there is a threshold.
        threshold: a request's drafting ends with the draft at which its product falls under this; None for no such end.
    """

    def __init__(
        self,
        num_slots: int,
        num_draft_tokens: int,
        device: torch.device,
        threshold: float | None = None,
        note: NoteConfidence = note_confidence_reference,
    ) -> None:
        self.survival = torch.zeros((num_slots + 1, num_draft_tokens), device=device)
        self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.num_going_on = torch.zeros(1, dtype=torch.int64, device=device)
        self.threshold = threshold
        self._running = torch.ones(num_slots + 1, device=device)
        self._note = note

    def begin(self, slot_ids: torch.Tensor, probability: torch.Tensor) -> None:
        """Note the top-1 probability [batch] of draft 1 of `slot_ids` [batch]."""
        self._write(slot_ids, probability, None)

    def go_on(self, slot_ids: torch.Tensor, probability: torch.Tensor, column: torch.Tensor) -> None:
        """Note that of the draft of `column` [1], from 0."""
        self._write(slot_ids, probability, column)

    def _write(self, slot_ids: torch.Tensor, probability: torch.Tensor, column: torch.Tensor | None) -> None:
        places = self.survival, self._running, self.num_drafted, self.num_going_on
        self._note(*places, slot_ids, probability, column, self.threshold)
