"""The paths of a static tree, which are the same in every round. They determine the row of each draft.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

DraftPath = tuple[int, ...]


class DraftPaths:
    """Numbers the rows of a static tree: by depth, then by path. The rank of a draft is its place among its siblings.

    Attributes:
        paths: for each row, the ranks of its ancestors and its own; empty for the root, row 0.
        depth: the number of drafts on the longest path.
        parents: the parent of each row; the root is its own parent.
        children: the children of each row, by rank.
        branches: the rows that have children.
    """

    def __init__(self, drafts: Sequence[Sequence[int]]) -> None:
        """`drafts`: for each draft, the ranks of its ancestors and its own. Each draft's parent must be listed too."""
        self.paths: list[DraftPath] = [(), *sorted(map(tuple, drafts), key=lambda path: (len(path), path))]
        self.depth = len(self.paths[-1])
        row_of = {path: row for row, path in enumerate(self.paths)}
        self.parents = [row_of[path[:-1]] for path in self.paths]
        self.children: list[list[int]] = [[] for _ in self.paths]
        for row, parent in enumerate(self.parents[1:], start=1):
            self.children[parent].append(row)
        self.branches = [row for row, below in enumerate(self.children) if below]

    def rows_at(self, depth: int) -> list[int]:
        """List the rows at this depth below the root."""
        return [row for row, path in enumerate(self.paths) if len(path) == depth]

    def branches_at(self, depth: int) -> list[int]:
        """List the branches at this depth."""
        return [row for row in self.rows_at(depth) if self.children[row]]

    def way_to(self, row: int) -> list[int]:
        """List the rows from the root to `row`."""
        return [0] if row == 0 else [*self.way_to(self.parents[row]), row]

    def leaves_first(self, row: int = 0) -> list[int]:
        """List `row` and all its descendants in post-order: the descendants of a row come before it, and before its
        later siblings."""
        return [*(found for child in self.children[row] for found in self.leaves_first(child)), row]
