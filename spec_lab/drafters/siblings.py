"""Picks the children of a tree's branches: the likeliest tokens, or tokens drawn from the drafter's distribution.

Drawn children need a tree of fixed shape. A dynamic tree such as EAGLE-2's would choose among them by probability,
which would bias them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from spec_kernels.noise_reference import Use, race_speeds, round_key
from spec_kernels.tree_reference import first_in_order, rank_tokens_reference
from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.errors import UserError
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.drafters.picking import DraftedRows, GivenDrafts
from spec_lab.models.scored_tokens import ScoredTokens


@dataclass(slots=True)
class Ranked:
    """The tokens below each branch in order of rank; both fields are [batch, branches, topk].

    Attributes:
        log_probs: the drafter's log probabilities, in float32.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor


class BranchHead(Protocol):
    """Turns a draft model's output for branches into logits: one row for each branch, or one row for each request if
    its branches share them."""

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab], -inf outside the draft vocabulary."""
        ...

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return logits of only the tokens that the head can draft."""
        ...


class SiblingPicker(Protocol):
    """Picks the children of branches, and keeps the logits that verification needs."""

    def pick(self, head: BranchHead, hidden: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        """Pick the children of the branches at depth `depth`.

        `hidden` [batch, branches, hidden_size] is the model's output for these branches.
        """
        ...

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [batch, branches, vocab] from which the drafts of `slot_ids` were drawn; None if they were
        not drawn."""
        ...


def empty_ranks(logits: torch.Tensor, shape: tuple[int, ...]) -> Ranked:
    """Allocate `Ranked` tensors of the given shape."""
    return Ranked(logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32))


def logits_below(head: BranchHead, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits [batch, branches, vocab] in target ids."""
    batch, branches = hidden.shape[:2]
    return head.target_logits(hidden.flatten(0, 1)).unflatten(0, (batch, -1)).expand(-1, branches, -1)


class LikeliestSiblings(GivenDrafts):
    """Picks the likeliest tokens of those that the head can draft.

    Ties go to the token that the head lists first. This is the lower target id, if the head's list is sorted.
    """

    def __init__(self, topk: int, kernels: KernelSet = TORCH_FORMS) -> None:
        self._topk = topk
        self._rank_tokens = kernels.get(Op.RANK_TOKENS, rank_tokens_reference)

    def pick(self, head: BranchHead, hidden: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        scored, (batch, branches) = head.scored_tokens(hidden.flatten(0, 1)), hidden.shape[:2]
        ids, logits = scored.token_ids, scored.logits
        if self._topk > logits.shape[-1]:
            raise UserError(
                f"a tree with {self._topk} branches, but the drafter scores {logits.shape[-1]} tokens; lower tree.topk"
            )
        ranked = empty_ranks(logits, (logits.shape[0], self._topk))
        of_rows = ids is not None and ids.dim() == 2
        self._rank_tokens(ranked.tokens, ranked.log_probs, logits, None if of_rows else ids)
        tokens = ids.gather(1, ranked.tokens) if ids is not None and of_rows else ranked.tokens
        found = (values.unflatten(0, (batch, -1)).expand(-1, branches, -1) for values in (tokens, ranked.log_probs))
        return Ranked(*(values.contiguous() for values in found))


class DrawnSiblings:
    """Draws from the drafter's distribution at a temperature, and keeps its logits by slot and branch.

    Without replacement the siblings are the first arrivals of one exponential race. So each follows the distribution
    that remains without the earlier ones. The first sibling uses the noise of a chain's draft in the same row.
    """

    def __init__(
        self, paths: DraftPaths, topk: int, replacement: bool, temperature: float, seeds: SlotSeeds, kept: DraftLogits
    ) -> None:
        assert temperature > 0, "greedy drafts are ranked"
        self._topk = topk
        self._replacement = replacement
        self._temperature = temperature
        self._seeds = seeds
        self._kept = kept
        self._num_rows = len(paths.paths)
        device = seeds.values.device
        levels = [paths.branches_at(depth) for depth in range(paths.depth)]
        self._rows = [torch.tensor(rows, device=device) for rows in levels]
        self._numbers = [torch.tensor([paths.branches.index(row) for row in rows], device=device) for rows in levels]

    def pick(self, head: BranchHead, hidden: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        return self.draw(logits_below(head, hidden), rows, depth)

    def draw(self, logits: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        """Draw the children of branches with these logits [batch, branches, vocab]."""
        scaled = logits.float() / self._temperature
        weights = torch.softmax(scaled, dim=-1)
        places = self._rows[depth]
        if self._replacement:
            keys = [self._keys(rows, places + rank * self._num_rows) for rank in range(self._topk)]
            tokens = torch.stack([race_speeds(weights, of_rank).argmax(dim=-1) for of_rank in keys], dim=-1)
        else:
            tokens = first_in_order(race_speeds(weights, self._keys(rows, places)), self._topk)
        self._kept.write_rows(rows.slot_ids, self._numbers[depth], scaled)
        return Ranked(tokens, weights.gather(-1, tokens).log())

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self._kept.of(slot_ids)

    def _keys(self, rows: DraftedRows, places: torch.Tensor) -> torch.Tensor:
        """Make the noise keys [batch, branches] of draws at `places` [branches]."""
        seeds, kv_lens = self._seeds.of(rows.slot_ids).unsqueeze(1), rows.kv_lens.unsqueeze(1)
        return round_key(seeds, kv_lens, places, Use.DRAFT)
