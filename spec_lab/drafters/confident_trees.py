"""Trees of drafts whose rows' confidences are noted, and whose branches end where the drafter is unsure.

Below a branch that has ended nothing is drafted: what was looked at there gets the score -inf, and its row holds no
draft. All that `finish` reads lies in tensors from before the first level, so that a replay may skip the last levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.tree_reference import best_in_order, parents_of_rows, scored
from spec_lab.acceptance.confidences import RowConfidences
from spec_lab.core.draft_tree import DraftTree
from spec_lab.drafters.growth import Branches, DynamicTree, ScoredDrafts, StaticTree
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import Ranked


@dataclass(slots=True)
class NotedDrafts:
    """The drafts of `slot_ids` [batch]; what nothing was found for has the token 0 and the score -inf."""

    drafts: ScoredDrafts
    slot_ids: torch.Tensor


class ConfidentDynamicTree:
    """EAGLE-2's tree, whose scores are noted."""

    def __init__(self, tree: DynamicTree, confidences: RowConfidences) -> None:
        self.depth, self.num_rows, self.topk = tree.depth, tree.num_rows, tree.topk
        self.exact_branches = tree.exact_branches
        self._tree = tree
        self._confidences = confidences

    def start(self, ranked: Ranked, rows: DraftedRows) -> NotedDrafts:
        drafts = self._tree.start(ranked, rows)
        drafts.tokens.zero_()
        drafts.scores.fill_(-torch.inf)
        drafts.parents.fill_(-1)
        growth = NotedDrafts(drafts, rows.slot_ids)
        self._take(growth, ranked)
        return growth

    def branch(self, growth: NotedDrafts, hidden: torch.Tensor) -> Branches:
        return self._tree.branch(growth.drafts, hidden)

    def add(self, growth: NotedDrafts, ranked: Ranked) -> None:
        assert growth.drafts.branch_scores is not None, "branches were chosen"
        log_probs = self._confidences.cut(ranked.log_probs, growth.drafts.branch_scores)
        self._take(growth, Ranked(ranked.tokens, log_probs))

    def finish(self, growth: NotedDrafts) -> DraftTree:
        drafts = growth.drafts
        chosen = best_in_order(drafts.scores, self.num_rows - 1)
        self._confidences.note_rows(growth.slot_ids, drafts.scores.gather(1, chosen))
        return DraftTree(drafts.tokens.gather(1, chosen), parents_of_rows(drafts.parents, chosen))

    def _take(self, growth: NotedDrafts, ranked: Ranked) -> None:
        """Take a level into the pool at once, where choosing its branches would, one step later."""
        drafts = growth.drafts
        self._tree.add(drafts, ranked)
        scores, parents = scored(ranked.log_probs, drafts.branches, drafts.branch_scores)
        level = slice(drafts.num_before, drafts.num_before + scores.shape[1])
        drafts.tokens[:, level] = ranked.tokens.flatten(1)
        drafts.scores[:, level] = scores
        drafts.parents[:, level] = parents
        self._confidences.note_level(growth.slot_ids, scores)


@dataclass(slots=True)
class NotedLevels:
    """The levels of a static tree.

    Attributes:
        levels: [batch, drafts] tokens of each so far.
        tokens: [batch, N - 1] the same in their rows, 0 where there is none yet.
        scores: [batch, N - 1] of these, -inf where there is none.
        newest: [batch, drafts] of the newest level.
        branch_scores: [batch, branches] of those that go on from it; 0 for the root.
        slot_ids: [batch].
    """

    levels: list[torch.Tensor]
    tokens: torch.Tensor
    scores: torch.Tensor
    newest: torch.Tensor
    branch_scores: torch.Tensor
    slot_ids: torch.Tensor


class ConfidentStaticTree:
    """A tree of the same paths in every round, as far as branches go on."""

    exact_branches = True

    def __init__(self, tree: StaticTree, confidences: RowConfidences) -> None:
        self.depth, self.num_rows, self.topk = tree.depth, tree.num_rows, tree.topk
        self._tree = tree
        self._confidences = confidences

    def start(self, ranked: Ranked, rows: DraftedRows) -> NotedLevels:
        batch, num_drafts = ranked.tokens.shape[0], self.num_rows - 1
        tokens = ranked.tokens.new_zeros((batch, num_drafts))
        scores = ranked.log_probs.new_full((batch, num_drafts), -torch.inf)
        root = ranked.log_probs.new_zeros((batch, 1))
        growth = NotedLevels([], tokens, scores, root, root, rows.slot_ids)
        self._take(growth, ranked)
        return growth

    def branch(self, growth: NotedLevels, hidden: torch.Tensor) -> Branches:
        growth.branch_scores = self._tree.levels[len(growth.levels) - 1].branches_of(growth.newest)
        return self._tree.branch(growth.levels, hidden)

    def add(self, growth: NotedLevels, ranked: Ranked) -> None:
        self._take(growth, Ranked(ranked.tokens, self._confidences.cut(ranked.log_probs, growth.branch_scores)))

    def finish(self, growth: NotedLevels) -> DraftTree:
        self._confidences.note_rows(growth.slot_ids, growth.scores)
        return self._tree.of_tokens(growth.tokens)

    def _take(self, growth: NotedLevels, ranked: Ranked) -> None:
        first = sum(level.shape[1] for level in growth.levels)
        found = (growth.branch_scores.unsqueeze(2) + ranked.log_probs).flatten(1)
        growth.newest = self._tree.levels[len(growth.levels)].drafts_of(found)
        self._tree.add(growth.levels, ranked)
        level = slice(first, first + growth.newest.shape[1])
        growth.tokens[:, level] = growth.levels[-1]
        growth.scores[:, level] = growth.newest
        self._confidences.note_level(growth.slot_ids, growth.newest)
