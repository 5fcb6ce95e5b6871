"""The confidence of a drafter in draft i of a chain: the product of its top-1 probabilities for drafts 1 to i.

A model with a confidence head gives the head's estimates instead. The top-1 probability is a property of the
distribution, known before a token is drawn from it. The drawn token's own probability must not decide whether the draft
is offered: unlikely tokens would be offered less often, which biases the output. vLLM's estimator for adaptive
verification (#47808) reads max q for the same reason.

A drafter may be overconfident. A temperature for each draft corrects that. The temperatures are fitted in the order of
the drafts, so that each product is calibrated (sequential temperature scaling, DSpark, arXiv 2607.05147).
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
    """Multiply the running products of `slot_ids` by the top-1 probabilities [batch] of the newest drafts, and store
    them.

    `column` [1] is the index of the draft, from 0; None for index 0, which restarts the product. With a threshold,
    `num_going_on` [1] becomes the number of requests outside the scratch slot whose product is at least the threshold.
    `running` [num_slots + 1] has the products; `survival` and `num_drafted` are those of `DraftConfidences`.
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
    """Stores for each slot how likely the target is to accept drafts 1 to i, as the drafter estimates it.

    The tensors stay at fixed addresses, and the column to write is a tensor too. So one captured draft step can be
    replayed for every draft.

    Attributes:
        survival: [num_slots + 1, K] column i is the product of the top-1 probabilities of drafts 1 to i + 1. Columns
            from `num_drafted` on are stale.
        num_drafted: [num_slots + 1] drafts that each slot holds.
        num_going_on: [1] requests of the latest batch that want another draft; the scratch slot does not count. Written
            only if there is a threshold.
        threshold: a request wants no draft after one whose product is below this; None if all want K drafts.
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
        """`temperatures`: one for each draft; None stores the probabilities unscaled."""
        self._temperatures = None if temperatures is None else torch.tensor(temperatures, device=device)
        self.survival = torch.zeros((num_slots + 1, num_draft_tokens), device=device)
        self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.num_going_on = torch.zeros(1, dtype=torch.int64, device=device)
        self.threshold = threshold
        self._running = torch.ones(num_slots + 1, device=device)
        self._note = kernels.get(Op.NOTE_CONFIDENCE, note_confidence)

    def begin(self, slot_ids: torch.Tensor, probability: torch.Tensor) -> None:
        """Store the top-1 probability [batch] of draft 1 of `slot_ids` [batch]."""
        self._write(slot_ids, probability, None)

    def go_on(self, slot_ids: torch.Tensor, probability: torch.Tensor, column: torch.Tensor) -> None:
        """Store the top-1 probability [batch] of the draft at `column` [1], from 0."""
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
        """Divide the log-odds of each probability [batch] by the temperature of its draft."""
        own = temperatures[:1] if column is None else temperatures.index_select(0, column)
        return torch.sigmoid(torch.logit(probability) / own)


class RowConfidences:
    """Stores for each slot how likely the target is to accept the path to each row of a tree, as the drafter estimates
    it.

    A tree with confidences drafts the likeliest tokens and samples none. So the product takes each draft's own
    probability.

    Attributes:
        scores: [num_slots + 1, N - 1] the log of the product of probabilities from the root to each draft; -inf for a
            row without a draft. A draft's score is never above its parent's.
        num_going_on: [1] requests of the latest batch with a draft in the newest level that reaches the threshold; the
            scratch slot does not count. Written only if there is a threshold.
        may_end: whether there is a threshold.
    """

    def __init__(self, num_slots: int, num_rows: int, device: torch.device, threshold: float | None = None) -> None:
        """`num_rows`: N, which includes the root; `threshold`: a draft whose product is below this gets no children;
        None for no such stop."""
        self.scores = torch.full((num_slots + 1, num_rows - 1), -torch.inf, device=device)
        self.num_going_on = torch.zeros(1, dtype=torch.int64, device=device)
        self.may_end = threshold is not None
        self._least = math.log(threshold) if threshold else -torch.inf

    def cut(self, log_probs: torch.Tensor, branch_scores: torch.Tensor) -> torch.Tensor:
        """Return `log_probs` [batch, branches, topk], set to -inf for branches whose score is below the threshold.

        `branch_scores` is [batch, branches].
        """
        if not self.may_end:
            return log_probs
        return torch.where((branch_scores >= self._least).unsqueeze(2), log_probs, -torch.inf)

    def note_level(self, slot_ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Count the requests that want another level after one with these scores [batch, drafts]."""
        if self.may_end:
            goes_on = (scores >= self._least).any(dim=1) & (slot_ids != self.scores.shape[0] - 1)
            self.num_going_on.copy_(goes_on.sum())

    def note_rows(self, slot_ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Store the scores [batch, N - 1] of the rows of `slot_ids` [batch]."""
        self.scores.index_copy_(0, slot_ids, scores)
