"""Grows a tree of drafts: decides which drafts of a level become branches, and which drafts are verified.

The tensors of both the dynamic and the static tree have fixed shapes. A drafter runs its model on the branches, and
passes the candidates below each to `add`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from spec_kernels.tree_reference import choose_branches_reference, choose_rows_reference
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import Ranked


@dataclass(slots=True)
class Branches:
    """The drafts of the newest level that get children.

    Attributes:
        tokens: [batch, branches].
        came_from: [batch, branches] each branch's parent, as an index into the previous step's branches.
        hidden: [batch * branches, hidden_size] the model's output for these parents.
    """

    tokens: torch.Tensor
    came_from: torch.Tensor
    hidden: torch.Tensor


Growth = TypeVar("Growth")


class TreeShape(Protocol[Growth]):
    """Decides which drafts are in a tree.

    Attributes:
        depth: the number of levels.
        num_rows: the number of rows that are verified, which includes the root.
        topk: the number of candidate tokens below a branch.
    """

    depth: int
    num_rows: int
    topk: int

    def start(self, ranked: Ranked, rows: DraftedRows) -> Growth:
        """Begin the trees of the requests `rows`. `ranked` has level 1, the candidates below the root."""
        ...

    def branch(self, growth: Growth, hidden: torch.Tensor) -> Branches:
        """Choose the branches of the next step.

        `hidden` [batch, branches before, hidden_size] is the model's output for the branches of the last step.
        """
        ...

    def add(self, growth: Growth, ranked: Ranked) -> None:
        """Add the candidates below the branches that were chosen last."""
        ...

    def finish(self, growth: Growth) -> DraftTree:
        """Choose the drafts that are verified, from the levels that were added."""
        ...


@dataclass(slots=True)
class ScoredDrafts:
    """The pool of all candidate drafts so far.

    Attributes:
        tokens: [batch, pool size], with room for all levels. The first `num_before` are those of all levels but the
            newest.
        scores: [batch, pool size] the sum of log probabilities on the path from the root.
        parents: [batch, pool size] the parent's index in the pool; -1 if it is the root.
        newest: the candidates below the branches that were chosen last.
        branches: [batch, branches] the pool indices of these branches; None before there are any.
        branch_scores: [batch, branches] their scores.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    newest: Ranked
    num_before: int = 0
    branches: torch.Tensor | None = None
    branch_scores: torch.Tensor | None = None


class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): the topk likeliest drafts of each level become branches, and the likeliest
    drafts of all levels are verified.

    A draft is never likelier than its parent, and of equal scores the earlier wins. So a chosen draft's parent is
    always chosen too.
    """

    def __init__(self, depth: int, num_rows: int, topk: int, kernels: KernelSet = TORCH_FORMS) -> None:
        self.depth = depth
        self.num_rows = num_rows
        self.topk = topk
        self._choose_branches = kernels.get(Op.CHOOSE_BRANCHES, choose_branches_reference)
        self._choose_rows = kernels.get(Op.CHOOSE_ROWS, choose_rows_reference)

    def start(self, ranked: Ranked, rows: DraftedRows) -> ScoredDrafts:
        batch, most = ranked.tokens.shape[0], self.topk + (self.depth - 1) * self.topk**2
        tokens, parents = ranked.tokens.new_empty((2, batch, most))
        return ScoredDrafts(tokens, ranked.log_probs.new_empty((batch, most)), parents, ranked)

    def branch(self, growth: ScoredDrafts, hidden: torch.Tensor) -> Branches:
        batch = hidden.shape[0]
        tokens, came_from, numbers = growth.tokens.new_empty((3, batch, self.topk))
        branches = Branches(tokens, came_from, hidden.new_empty(batch * self.topk, hidden.shape[2]))
        scores = growth.scores.new_empty((batch, self.topk))
        self._choose_branches(
            growth.tokens,
            growth.scores,
            growth.parents,
            tokens,
            came_from,
            numbers,
            scores,
            branches.hidden,
            growth.newest.tokens,
            growth.newest.log_probs,
            growth.branches,
            growth.branch_scores,
            hidden.contiguous(),
            growth.num_before,
        )
        growth.num_before += growth.newest.tokens.shape[1] * self.topk
        growth.branches, growth.branch_scores = numbers, scores
        return branches

    def add(self, growth: ScoredDrafts, ranked: Ranked) -> None:
        growth.newest = ranked

    def finish(self, growth: ScoredDrafts) -> DraftTree:
        batch, newest = growth.tokens.shape[0], growth.newest
        tokens = growth.tokens.new_empty((batch, self.num_rows - 1))
        tree = DraftTree(tokens, growth.parents.new_empty((batch, self.num_rows)))
        self._choose_rows(
            tree.tokens,
            tree.parents,
            growth.tokens,
            growth.scores,
            growth.parents,
            newest.tokens,
            newest.log_probs,
            growth.branches,
            growth.branch_scores,
            growth.num_before,
        )
        return tree


@dataclass(slots=True)
class StaticLevel:
    """The constants of one level of a static tree.

    Attributes:
        taken: [drafts] indices into the candidates below the branches, branch * topk + rank; None if all are taken, as
            in a chain.
        going_on: [branches] which drafts of the level have children; None if all have.
        came_from: [branches] the parent branch in the previous step.
        one_each: each branch of the previous step has exactly one branch below it.
    """

    taken: torch.Tensor | None
    going_on: torch.Tensor | None
    came_from: torch.Tensor
    one_each: bool

    def drafts_of(self, found: torch.Tensor) -> torch.Tensor:
        """Select the drafts that are in the tree from candidates [batch, branches * topk]."""
        return found if self.taken is None else found.index_select(1, self.taken)

    def branches_of(self, drafts: torch.Tensor) -> torch.Tensor:
        """Select the drafts that have children, [batch, branches]."""
        return drafts if self.going_on is None else drafts.index_select(1, self.going_on)


class StaticTree:
    """Takes the same paths in every round, without scoring or sorting."""

    def __init__(self, paths: DraftPaths, device: torch.device) -> None:
        self.depth = paths.depth
        self.num_rows = len(paths.paths)
        self.topk = max(path[-1] for path in paths.paths[1:]) + 1
        self._parents = torch.tensor(paths.parents, device=device)
        self.levels = [self._make_level(paths, depth, device) for depth in range(1, self.depth + 1)]

    def _make_level(self, paths: DraftPaths, depth: int, device: torch.device) -> StaticLevel:
        branches, drafts, going_on = paths.branches_at(depth - 1), paths.rows_at(depth), paths.branches_at(depth)
        came_from = [branches.index(paths.parents[row]) for row in going_on]
        return StaticLevel(
            _some_of(
                [branches.index(paths.parents[row]) * self.topk + paths.paths[row][-1] for row in drafts],
                len(branches) * self.topk,
                device,
            ),
            _some_of([drafts.index(row) for row in going_on], len(drafts), device),
            torch.tensor(came_from, dtype=torch.int64, device=device),
            came_from == list(range(len(branches))),
        )

    def start(self, ranked: Ranked, rows: DraftedRows) -> list[torch.Tensor]:
        growth: list[torch.Tensor] = []
        self.add(growth, ranked)
        return growth

    def branch(self, growth: list[torch.Tensor], hidden: torch.Tensor) -> Branches:
        level, newest = self.levels[len(growth) - 1], growth[-1]
        came_from = level.came_from.expand(newest.shape[0], -1)
        below = hidden if level.one_each else hidden.index_select(1, level.came_from)
        return Branches(level.branches_of(newest), came_from, below.flatten(0, 1))

    def add(self, growth: list[torch.Tensor], ranked: Ranked) -> None:
        growth.append(self.levels[len(growth)].drafts_of(ranked.tokens.flatten(1)))

    def finish(self, growth: list[torch.Tensor]) -> DraftTree:
        return self.of_tokens(torch.cat(growth, dim=1))

    def of_tokens(self, tokens: torch.Tensor) -> DraftTree:
        """Return the tree with the given tokens [batch, N - 1]."""
        return DraftTree(tokens, self._parents.expand(tokens.shape[0], -1))


def _some_of(numbers: list[int], count: int, device: torch.device) -> torch.Tensor | None:
    """Return `numbers` as a tensor; None if they are 0..`count` - 1 in order."""
    if numbers == list(range(count)):
        return None
    return torch.tensor(numbers, dtype=torch.int64, device=device)
