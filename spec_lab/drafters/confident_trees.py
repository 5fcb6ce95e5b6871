"""A dynamic tree that stores the confidence of its rows, so that the likeliest can be chosen when they are verified."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.tree_reference import best_in_order, parents_of_rows, scored
from spec_lab.acceptance.confidences import RowConfidences
from spec_lab.core.draft_tree import DraftTree
from spec_lab.drafters.growth import Branches, DynamicTree, ScoredDrafts
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import Ranked


@dataclass(slots=True)
class NotedDrafts:
    """The drafts of `slot_ids` [batch]."""

    drafts: ScoredDrafts
    slot_ids: torch.Tensor


class ConfidentDynamicTree:
    """EAGLE-2's tree, with stored scores."""

    def __init__(self, tree: DynamicTree, confidences: RowConfidences) -> None:
        self.depth, self.num_rows, self.topk = tree.depth, tree.num_rows, tree.topk
        self.exact_branches = tree.exact_branches
        self._tree = tree
        self._confidences = confidences

    def start(self, ranked: Ranked, rows: DraftedRows) -> NotedDrafts:
        return NotedDrafts(self._tree.start(ranked, rows), rows.slot_ids)

    def branch(self, growth: NotedDrafts, hidden: torch.Tensor) -> Branches:
        return self._tree.branch(growth.drafts, hidden)

    def add(self, growth: NotedDrafts, ranked: Ranked) -> None:
        self._tree.add(growth.drafts, ranked)

    def finish(self, growth: NotedDrafts) -> DraftTree:
        """Add the last level to the pool, and choose rows as `DynamicTree` does."""
        drafts = growth.drafts
        scores, parents = scored(drafts.newest.log_probs, drafts.branches, drafts.branch_scores)
        level = slice(drafts.num_before, drafts.num_before + scores.shape[1])
        drafts.tokens[:, level] = drafts.newest.tokens.flatten(1)
        drafts.scores[:, level] = scores
        drafts.parents[:, level] = parents
        chosen = best_in_order(drafts.scores, self.num_rows - 1)
        self._confidences.note_rows(growth.slot_ids, drafts.scores.gather(1, chosen))
        return DraftTree(drafts.tokens.gather(1, chosen), parents_of_rows(drafts.parents, chosen))
