"""A picker finds what hangs below a branch of a tree: its likeliest tokens, or tokens drawn from the drafter's law.

Drawn ones are for a tree whose shape is given: to choose among them by their probability, as EAGLE-2's tree does, would
bend the law of what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from spec_kernels.noise_reference import Use, race_speeds, round_key
from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.drafters.picking import DraftedRows, GivenDrafts


@dataclass(slots=True)
class Ranked:
    """Holds the tokens below each branch, the first first: both [batch, branches, topk].

    Attributes:
        log_probs: of the drafter, in float32.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor


class SiblingPicker(Protocol):
    """Picks what hangs below branches, and keeps what verification needs to know of it."""

    def pick(self, logits: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        """Pick from logits [batch, branches, vocab] of the branches `depth` drafts below the root."""
        ...

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the [batch, branches, vocab] logits of what the drafts of `slot_ids` were drawn from; None when they
        are given."""
        ...


def rank_tokens(logits: torch.Tensor, topk: int) -> Ranked:
    """Find the `topk` likeliest tokens of [batch, branches, vocab] logits, of equal ones the lowest id first."""
    logits = logits.float()
    tokens = in_order(logits, topk)
    log_probs = logits.gather(-1, tokens) - logits.logsumexp(dim=-1, keepdim=True)
    # A rounded sum may fall under its largest part, and a child must not look likelier than its parent.
    return Ranked(tokens, log_probs.clamp(max=0.0))


def in_order(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [..., count] of the largest of [..., vocab] values, of equal ones the lowest first.

    One by one, since `torch.topk` promises no order of equal values.
    """
    left, found = values.clone(), []
    for _ in range(count):
        best = left.argmax(dim=-1, keepdim=True)
        left.scatter_(-1, best, float("-inf"))
        found.append(best)
    return torch.cat(found, dim=-1)


class LikeliestSiblings(GivenDrafts):
    """Picks the likeliest tokens."""

    def __init__(self, topk: int) -> None:
        self._topk = topk

    def pick(self, logits: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        return rank_tokens(logits, self._topk)


class DrawnSiblings:
    """Draws from the drafter's distribution at a temperature, and keeps its logits by slot and branch.

    Without replacement the siblings are the first arrivals of one race, each of which so follows the distribution that
    those before it left. The first sibling of a branch has the noise of the draft that a chain has in that row.
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

    def pick(self, logits: torch.Tensor, rows: DraftedRows, depth: int) -> Ranked:
        scaled = logits.float() / self._temperature
        weights = torch.softmax(scaled, dim=-1)
        tokens = self._drawn_anew(weights, rows, depth) if self._replacement else self._drawn(weights, rows, depth)
        self._kept.write_rows(rows.slot_ids, self._numbers[depth], scaled)
        return Ranked(tokens, weights.gather(-1, tokens).log())

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self._kept.of(slot_ids)

    def _drawn(self, weights: torch.Tensor, rows: DraftedRows, depth: int) -> torch.Tensor:
        return in_order(race_speeds(weights, self._keys(rows, self._rows[depth])), self._topk)

    def _drawn_anew(self, weights: torch.Tensor, rows: DraftedRows, depth: int) -> torch.Tensor:
        keys = [self._keys(rows, self._rows[depth] + rank * self._num_rows) for rank in range(self._topk)]
        return torch.stack([race_speeds(weights, of_rank).argmax(dim=-1) for of_rank in keys], dim=-1)

    def _keys(self, rows: DraftedRows, places: torch.Tensor) -> torch.Tensor:
        """Make the keys [batch, branches] of draws at `places` [branches]."""
        seeds, kv_lens = self._seeds.of(rows.slot_ids).unsqueeze(1), rows.kv_lens.unsqueeze(1)
        return round_key(seeds, kv_lens, places, Use.DRAFT)
