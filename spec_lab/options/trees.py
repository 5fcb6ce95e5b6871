"""The trees of drafts. tree=none is the base, `spec_lab.config.groups.TreeConfig`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from spec_lab.config.groups import TreeConfig, TreeSizes
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.drafters.growth import TreeShape

MAX_ROWS, MAX_TOPK, MAX_DEPTH = 64, 16, 16
"""The upper bounds of a tree's sizes."""

# The default has the first level and the number of rows of the default dynamic tree. The likelier a draft of
# the first level, the more drafts are below it.
DEFAULT_PATHS = [
    [0], [1], [2], [3],
    [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0],
    [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [1, 0, 0],
]  # fmt: skip


@option("tree", "dynamic")
class DynamicTreeConfig(TreeConfig):
    """Each round chooses which drafts are in the tree, as in EAGLE-2."""

    topk: int = knob(4, "number of branches in a level, and of candidates below each", least=1, most=MAX_TOPK)
    depth: int = knob(3, "number of levels: drafter.num_draft_tokens, which is typed", least=1, most=MAX_DEPTH)
    num_rows: int = knob(16, "verify rows of a request, including the pending token", least=2, most=MAX_ROWS)

    @property
    def sizes(self) -> TreeSizes:
        width = self.topk if self.depth > 1 else 1
        return TreeSizes(self.depth, self.num_rows, self.topk, width, spine=self.depth)

    def check(self, run: Run) -> Iterator[str]:
        most = self.topk + (self.depth - 1) * self.topk**2 + 1
        if self.num_rows > most:
            yield f"tree.num_rows={self.num_rows} is more than the {most} rows that are scored; use {most}"
        if run.draws_drafts:
            # Keeping the likeliest of drawn drafts changes their distribution.
            yield (
                "drafter.draft_sampling=distribution with tree=dynamic would bias the drafts; use tree=static or "
                "drafter.draft_sampling=greedy"
            )

    def build(self, lab: Lab) -> TreeShape[Any]:
        from spec_lab.drafters.growth import DynamicTree

        return DynamicTree(self.depth, self.num_rows, topk=self.topk, kernels=lab.kernels)


@option("tree", "static")
class StaticTreeConfig(TreeConfig):
    """The same paths in every round."""

    paths: list[list[int]] = knob(DEFAULT_PATHS, "a list for each draft: the ranks of its ancestors, then its own")
    replacement: bool = knob(
        False, "sampled siblings are independent and may be equal; drafter.draft_sampling=distribution only"
    )

    @property
    def sizes(self) -> TreeSizes:
        paths = self.paths or [[0]]
        parents = {tuple(path[:-1]) for path in paths}
        widths = Counter(map(len, parents))
        return TreeSizes(
            depth=max(map(len, paths)),
            num_rows=len(paths) + 1,
            topk=max((path[-1] for path in paths if path), default=0) + 1,
            width=max(widths.values()),
            spine=next(length for length in count() if [0] * (length + 1) not in paths),
        )

    def check(self, run: Run) -> Iterator[str]:
        """A list of paths that is no tree, or sampled siblings with a gap in their ranks, would draft in silence."""
        paths = {tuple(path) for path in self.paths}
        ranks_fit = all(
            path and len(path) <= MAX_DEPTH and all(0 <= rank < MAX_TOPK for rank in path) for path in paths
        )
        if not 1 <= len(self.paths) < MAX_ROWS or len(paths) < len(self.paths) or not ranks_fit:
            yield (
                f"tree.paths must be 1 to {MAX_ROWS - 1} different lists of up to {MAX_DEPTH} ranks from 0 to "
                f"{MAX_TOPK - 1}; use tree.paths=[[0],[1],[0,0]]"
            )
            return
        needed = {path[:-1] for path in paths if len(path) > 1}
        if run.draws_drafts:  # each sibling is drawn from what those before it left
            needed |= {(*path[:-1], path[-1] - 1) for path in paths if path[-1] > 0}
        if missing := sorted(needed - paths):
            yield f"tree.paths continues {list(missing[0])}, which is missing; add {list(missing[0])}"

    def build(self, lab: Lab) -> TreeShape[Any]:
        from spec_lab.core.draft_paths import DraftPaths
        from spec_lab.drafters.growth import StaticTree

        return StaticTree(DraftPaths(self.paths), lab.device)
