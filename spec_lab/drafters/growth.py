"""A tree of drafts grows here: which drafts of a level get a draft step of their own, and which are verified.

Both ways have fixed shapes. A drafter runs its model on the branches and hands back the likeliest tokens below each; it
knows nothing of the tree besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.draft_tree import DraftTree
from spec_lab.drafters.siblings import Ranked


@dataclass(slots=True)
class Branches:
    """Holds the drafts of the newest level that go on.

    Attributes:
        tokens: [batch, branches].
        came_from: [batch, branches] the branch of the step before that each hangs below.
    """

    tokens: torch.Tensor
    came_from: torch.Tensor


def rows_of_branches(hidden: torch.Tensor, branches: Branches) -> torch.Tensor:
    """Hand each branch the row it came from: of [batch, branches before, width] to [batch * branches, width]."""
    index = branches.came_from.unsqueeze(2).expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, index).flatten(0, 1)


Growth = TypeVar("Growth")


class TreeShape(Protocol[Growth]):
    """Decides which drafts are in a tree.

    Attributes:
        depth: levels.
        num_rows: rows that are verified, the root with them.
        topk: likeliest tokens that are looked at below a branch.
        exact_branches: a branch sees the keys of its own ancestors, and not of whatever stood in its place.
    """

    depth: int
    num_rows: int
    topk: int
    exact_branches: bool

    def start(self, ranked: Ranked) -> Growth:
        """Take level 1, from the one branch that is the root."""
        ...

    def branch(self, growth: Growth) -> Branches:
        """Choose the branches of the next step."""
        ...

    def add(self, growth: Growth, ranked: Ranked) -> None:
        """Take what was found below the branches chosen last."""
        ...

    def finish(self, growth: Growth) -> DraftTree:
        """Choose the drafts that are verified."""
        ...


@dataclass(slots=True)
class ScoredDrafts:
    """Holds all drafts looked at so far, by level; each [batch, drafts of the level].

    Attributes:
        scores: the sum of log probabilities on the way from the root.
        parents: each draft's parent, as its number among all drafts so far; -1 is the root.
        branches: [batch, branches] numbers of the branches chosen last; None before there are any.
        branch_scores: [batch, branches] of these.
    """

    tokens: list[torch.Tensor]
    scores: list[torch.Tensor]
    parents: list[torch.Tensor]
    branches: torch.Tensor | None = None
    branch_scores: torch.Tensor | None = None


class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858): of each level the topk likeliest drafts go on, and of all drafts looked at the
    likeliest are verified.

    A draft is never likelier than its parent, and of equals the earlier one is taken, so a parent is always there.
    """

    def __init__(self, depth: int, num_rows: int, topk: int, exact_branches: bool = True) -> None:
        self.depth = depth
        self.num_rows = num_rows
        self.topk = topk
        self.exact_branches = exact_branches

    def start(self, ranked: Ranked) -> ScoredDrafts:
        tokens = ranked.tokens.flatten(1)
        return ScoredDrafts([tokens], [ranked.log_probs.flatten(1)], [torch.full_like(tokens, -1)])

    def branch(self, growth: ScoredDrafts) -> Branches:
        num_before = sum(level.shape[1] for level in growth.tokens[:-1])
        chosen = _likeliest(growth.scores[-1], self.topk)
        growth.branches = chosen + num_before
        growth.branch_scores = growth.scores[-1].gather(1, chosen)
        came_from = torch.div(chosen, self.topk, rounding_mode="floor")
        return Branches(growth.tokens[-1].gather(1, chosen), came_from)

    def add(self, growth: ScoredDrafts, ranked: Ranked) -> None:
        assert growth.branches is not None and growth.branch_scores is not None
        growth.tokens.append(ranked.tokens.flatten(1))
        growth.scores.append((growth.branch_scores.unsqueeze(2) + ranked.log_probs).flatten(1))
        growth.parents.append(growth.branches.repeat_interleave(self.topk, dim=1))

    def finish(self, growth: ScoredDrafts) -> DraftTree:
        tokens, scores, parents = (torch.cat(part, dim=1) for part in (growth.tokens, growth.scores, growth.parents))
        chosen = _likeliest(scores, self.num_rows - 1).sort(dim=1).values
        # The row of every draft that is taken, by its number; the root, number -1, comes first.
        rows = torch.arange(1, self.num_rows, device=chosen.device).expand_as(chosen)
        row_of = torch.zeros_like(tokens).scatter(1, chosen, rows)
        row_of = torch.cat((torch.zeros_like(row_of[:, :1]), row_of), dim=1)
        below = row_of.gather(1, parents.gather(1, chosen) + 1)
        return DraftTree(tokens.gather(1, chosen), torch.cat((torch.zeros_like(below[:, :1]), below), dim=1))


def _likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the numbers of the `count` best of [batch, drafts], of equals the earlier first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


@dataclass(slots=True)
class StaticLevel:
    """Holds the constants of one level of a static tree.

    Attributes:
        taken: [drafts] numbers among the tokens found below the branches, branch * topk + rank.
        going_on: [branches] which of the level's drafts have drafts below them.
        came_from: [branches] the branch of the step before.
    """

    taken: torch.Tensor
    going_on: torch.Tensor
    came_from: torch.Tensor


class StaticTree:
    """Takes the same paths in every round: nothing is scored and nothing sorted."""

    exact_branches = True

    def __init__(self, paths: DraftPaths, device: torch.device) -> None:
        self.depth = paths.depth
        self.num_rows = len(paths.paths)
        self.topk = max(path[-1] for path in paths.paths[1:]) + 1
        self._parents = torch.tensor(paths.parents, device=device)
        self._levels = [self._make_level(paths, depth, device) for depth in range(1, self.depth + 1)]

    def _make_level(self, paths: DraftPaths, depth: int, device: torch.device) -> StaticLevel:
        branches, drafts, going_on = paths.branches_at(depth - 1), paths.rows_at(depth), paths.branches_at(depth)
        parts = (
            [branches.index(paths.parents[row]) * self.topk + paths.paths[row][-1] for row in drafts],
            [drafts.index(row) for row in going_on],
            [branches.index(paths.parents[row]) for row in going_on],
        )
        return StaticLevel(*(torch.tensor(part, dtype=torch.int64, device=device) for part in parts))

    def start(self, ranked: Ranked) -> list[torch.Tensor]:
        growth: list[torch.Tensor] = []
        self.add(growth, ranked)
        return growth

    def branch(self, growth: list[torch.Tensor]) -> Branches:
        level, newest = self._levels[len(growth) - 1], growth[-1]
        came_from = level.came_from.expand(newest.shape[0], -1)
        return Branches(newest.index_select(1, level.going_on), came_from)

    def add(self, growth: list[torch.Tensor], ranked: Ranked) -> None:
        growth.append(ranked.tokens.flatten(1).index_select(1, self._levels[len(growth)].taken))

    def finish(self, growth: list[torch.Tensor]) -> DraftTree:
        tokens = torch.cat(growth, dim=1)
        return DraftTree(tokens, self._parents.expand(tokens.shape[0], -1))
