"""A tree of drafts may have the same paths in every round, from which the row of each draft follows. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

DraftPath = tuple[int, ...]


class DraftPaths:
    """Numbers the rows of a static tree: by depth, then by rank.

    Attributes:
        paths: of each row the ranks of its ancestors and its own; the root, row 0, has the empty one.
        depth: drafts on the longest path.
        parents: the row of each row's parent; the root is its own.
        children: the rows below each row, by rank.
        branches: the rows that have children, whose continuations are drafted.
    """

    def __init__(self, drafts: Sequence[Sequence[int]]) -> None:
        """`drafts`: for each the ranks of its ancestors and its own; a parent is there wherever a child is."""
        self.paths: list[DraftPath] = [(), *sorted(map(tuple, drafts), key=lambda path: (len(path), path))]
        self.depth = len(self.paths[-1])
        row_of = {path: row for row, path in enumerate(self.paths)}
        self.parents = [row_of[path[:-1]] for path in self.paths]
        self.children: list[list[int]] = [[] for _ in self.paths]
        for row, parent in enumerate(self.parents[1:], start=1):
            self.children[parent].append(row)
        self.branches = [row for row, below in enumerate(self.children) if below]

    def rows_at(self, depth: int) -> list[int]:
        """List the rows that are so many drafts below the root."""
        return [row for row, path in enumerate(self.paths) if len(path) == depth]

    def branches_at(self, depth: int) -> list[int]:
        """List the branches among them."""
        return [row for row in self.rows_at(depth) if self.children[row]]

    def way_to(self, row: int) -> list[int]:
        """List the rows from the root to `row`."""
        return [0] if row == 0 else [*self.way_to(self.parents[row]), row]

    def leaves_first(self, row: int = 0) -> list[int]:
        """List `row` and all that hangs below it in post-order: what is below a row stands before it, and before the
        row's later siblings."""
        return [*(found for child in self.children[row] for found in self.leaves_first(child)), row]
