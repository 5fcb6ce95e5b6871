"""Trees that store the confidence of their rows, and whose branches may stop where the drafter is unsure.

Nothing is drafted below a stopped branch: candidates there get the score -inf, and their rows hold no draft. `finish`
only reads tensors that `start` makes with the first level, so a replay may skip the last levels.
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
    """The drafts of `slot_ids` [batch]. Unused places have the token 0 and the score -inf."""

    drafts: ScoredDrafts
    slot_ids: torch.Tensor


class ConfidentDynamicTree:
    """EAGLE-2's tree, with stored scores."""

    def __init__(self, tree: DynamicTree, confidences: RowConfidences) -> None:
        self.depth, self.num_rows, self.topk = tree.depth, tree.num_rows, tree.topk
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
        """Add a level to the pool immediately. `DynamicTree` adds it when it next chooses branches."""
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
        levels: [batch, drafts] the tokens of each level so far.
        tokens: [batch, N - 1] the same tokens by row of the tree; 0 in rows that are not drafted yet.
        scores: [batch, N - 1] the scores of these rows; -inf in rows that are not drafted yet.
        newest: [batch, drafts] the scores of the newest level.
        branch_scores: [batch, branches] the scores of the newest branches; 0 for the root.
        slot_ids: [batch].
    """

    levels: list[torch.Tensor]
    tokens: torch.Tensor
    scores: torch.Tensor
    newest: torch.Tensor
    branch_scores: torch.Tensor
    slot_ids: torch.Tensor


class ConfidentStaticTree:
    """A tree with the same paths in every round, whose branches may stop early."""

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
