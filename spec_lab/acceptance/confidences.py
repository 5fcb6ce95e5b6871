"""The confidence of a drafter in its drafts is the product of its top-1 probabilities, from draft 1 on.

It is that of the distribution, and not of the token that was drawn from it: to leave out a draft because its own
probability is small would keep that token from standing there, and bias what is emitted. What is known before a token
is drawn biases nothing (vLLM's estimator for adaptive verification, #47808, reads max q for the same reason).

A drafter may be surer than it is right. A temperature for each draft mends that, found for one draft after another so
that the product up to it is as often right as it says (sequential temperature scaling, DSpark, arXiv 2607.05147).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet, Op


def note_confidence(
    survival: torch.Tensor,
    running: torch.Tensor,
    num_drafted: torch.Tensor,
    num_going_on: torch.Tensor,
    slot_ids: torch.Tensor,
    probabilities: torch.Tensor,
    column: torch.Tensor | None,
    threshold: float | None,
) -> None:
    """Multiply a slot's product by the top-1 probability [batch] of its draft, and write it down for that draft.

    `column` [1] is the draft's number from 0, None for the first. With a threshold `num_going_on` [1] becomes the
    number of requests whose product is not under it. The other tensors are those of `DraftConfidences`.
    """
    if column is None:
        product = probabilities
        survival[:, 0].index_copy_(0, slot_ids, product)
        num_drafted.index_fill_(0, slot_ids, 1)
    else:
        product = running.index_select(0, slot_ids) * probabilities
        survival.index_put_((slot_ids, column.expand_as(slot_ids)), product)
        num_drafted.index_copy_(0, slot_ids, (column + 1).expand_as(slot_ids))
    running.index_copy_(0, slot_ids, product)
    if threshold is not None:
        goes_on = (product >= threshold) & (slot_ids != survival.shape[0] - 1)
        num_going_on.copy_(goes_on.sum())


class DraftConfidences:
    """By slot, how likely the drafter thinks it that the target follows it so far: [num_slots + 1, K].

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
        kernels: KernelSet = TORCH_FORMS,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """`temperatures`: one for each draft; None leaves what is noted as it is."""
        self._temperatures = None if temperatures is None else torch.tensor(temperatures, device=device)
        self.survival = torch.zeros((num_slots + 1, num_draft_tokens), device=device)
        self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.num_going_on = torch.zeros(1, dtype=torch.int64, device=device)
        self.threshold = threshold
        self._running = torch.ones(num_slots + 1, device=device)
        self._note = kernels.get(Op.NOTE_CONFIDENCE, note_confidence)

    def begin(self, slot_ids: torch.Tensor, probability: torch.Tensor) -> None:
        """Note the top-1 probability [batch] of draft 1 of `slot_ids` [batch]."""
        self._write(slot_ids, probability, None)

    def go_on(self, slot_ids: torch.Tensor, probability: torch.Tensor, column: torch.Tensor) -> None:
        """Note that of the draft of `column` [1], from 0."""
        self._write(slot_ids, probability, column)

    def _write(self, slot_ids: torch.Tensor, probability: torch.Tensor, column: torch.Tensor | None) -> None:
        if self._temperatures is not None:
            probability = self._scaled(probability, self._temperatures, column)
        self._note(
            self.survival,
            self._running,
            self.num_drafted,
            self.num_going_on,
            slot_ids,
            probability,
            column,
            self.threshold,
        )

    def _scaled(
        self, probability: torch.Tensor, temperatures: torch.Tensor, column: torch.Tensor | None
    ) -> torch.Tensor:
        """Divide the logits of [batch] probabilities by the temperature of their draft."""
        own = temperatures[:1] if column is None else temperatures.index_select(0, column)
        return torch.sigmoid(torch.logit(probability) / own)


class RowConfidences:
    """By slot, how likely the drafter thinks it that the target follows a tree to each of its rows.

    Of a tree the likeliest tokens are drafted and none is drawn, so each draft's own probability is in the product.

    Attributes:
        scores: [num_slots + 1, N - 1] the logarithm of each draft's product of probabilities from the root; -inf of a
            row that holds no draft. A draft never has more than its parent.
        num_going_on: [1] requests of the batch noted last with a draft in their newest level that goes on; the scratch
            slot never does. Written where there is a threshold.
        may_end: there is one.
    """

    def __init__(self, num_slots: int, num_rows: int, device: torch.device, threshold: float | None = None) -> None:
        """`num_rows`: N, the root with them; `threshold`: nothing is drafted below a draft whose product falls under
        this; None for no such end."""
        self.scores = torch.full((num_slots + 1, num_rows - 1), -torch.inf, device=device)
        self.num_going_on = torch.zeros(1, dtype=torch.int64, device=device)
        self.may_end = threshold is not None
        self._least = math.log(threshold) if threshold else -torch.inf

    def cut(self, log_probs: torch.Tensor, branch_scores: torch.Tensor) -> torch.Tensor:
        """Return `log_probs` [batch, branches, topk] with -inf below branches [batch, branches] that do not go on."""
        if not self.may_end:
            return log_probs
        return torch.where((branch_scores >= self._least).unsqueeze(2), log_probs, -torch.inf)

    def note_level(self, slot_ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Count the requests that go on behind a level with these scores [batch, drafts]."""
        if self.may_end:
            goes_on = (scores >= self._least).any(dim=1) & (slot_ids != self.scores.shape[0] - 1)
            self.num_going_on.copy_(goes_on.sum())

    def note_rows(self, slot_ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Note the scores [batch, N - 1] of the rows of `slot_ids` [batch]."""
        self.scores.index_copy_(0, slot_ids, scores)
