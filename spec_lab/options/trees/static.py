"""tree=static: its keys, sizes, refusals, and the function that makes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from spec_lab.menu.chosen import drafts_are_drawn
from spec_lab.menu.config import RunConfig, TreeConfig, knob
from spec_lab.menu.option import MAX_DEPTH, MAX_ROWS, MAX_TOPK, TreeOption, TreeSizes

if TYPE_CHECKING:
    from spec_lab.acceptance.confidences import RowConfidences
    from spec_lab.drafters.confident_trees import ConfidentStaticTree
    from spec_lab.drafters.growth import StaticTree
    from spec_lab.wiring.models import DrafterBuild


# The default has the first level and the number of rows of the default dynamic tree. The likelier a draft of
# the first level, the more drafts are below it.
DEFAULT_PATHS = [
    [0], [1], [2], [3],
    [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0],
    [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [1, 0, 0],
]  # fmt: skip


@dataclass
class StaticTreeConfig(TreeConfig):
    """tree=static: the same paths in every round."""

    name: str = "static"
    paths: list[list[int]] = knob(DEFAULT_PATHS, "a list for each draft: the ranks of its ancestors, then its own")
    replacement: bool = knob(
        False, "sampled siblings are independent and may be equal; drafter.draft_sampling=distribution only"
    )


def static_sizes(options: StaticTreeConfig) -> TreeSizes:
    """Return the sizes of a static tree, which follow from its paths."""
    paths = options.paths or [[0]]
    parents = {tuple(path[:-1]) for path in paths}
    widths = Counter(map(len, parents))
    return TreeSizes(
        depth=max(map(len, paths)),
        num_rows=len(paths) + 1,
        topk=max((path[-1] for path in paths if path), default=0) + 1,
        width=max(widths.values()),
        spine=next(length for length in count() if [0] * (length + 1) not in paths),
    )


def paths_are_a_tree(config: RunConfig) -> str | None:
    """Every path of a static tree is listed once, has valid ranks, and continues a path that is listed too."""
    options: Any = config.tree
    if not 1 <= len(options.paths) < MAX_ROWS:
        return f"tree.paths has {len(options.paths)} drafts, outside 1..{MAX_ROWS - 1}; use tree.paths=[[0],[1],[0,0]]"
    paths = {tuple(path) for path in options.paths}
    for path in options.paths:
        shown = ",".join(map(str, path))
        if not path or not all(0 <= rank < MAX_TOPK for rank in path):
            return f"tree.paths: [{shown}] must have one rank or more, each of 0..{MAX_TOPK - 1}; use [0]"
        if len(path) > MAX_DEPTH:
            return f"tree.paths: [{shown}] has {len(path)} ranks, and a path has at most {MAX_DEPTH}; shorten it"
        if options.paths.count(path) > 1:
            return f"tree.paths names [{shown}] more than once; name each draft once"
        if len(path) > 1 and tuple(path[:-1]) not in paths:
            above = ",".join(map(str, path[:-1]))
            return f"tree.paths: [{shown}] is below [{above}], which is missing; add [{above}]"
    return None


def siblings_are_drawn(config: RunConfig) -> str | None:
    """tree.replacement is only set with sampled drafts, since the likeliest tokens are distinct anyway."""
    options: Any = config.tree
    if not options.replacement or drafts_are_drawn(config):
        return None
    is_greedy = config.sampling.temperature <= 0
    drawn = " sampling.temperature=1 acceptance=rejection acceptance.method=traversal" if is_greedy else ""
    return (
        "tree.replacement=true is for drawn siblings, but drafter.draft_sampling=greedy draws none; leave it out or "
        f"use drafter.draft_sampling=distribution{drawn}"
    )


def drawn_ranks_have_no_gap(config: RunConfig) -> str | None:
    """Sampled siblings must have no gap in their ranks. Without tree.replacement, each is drawn from the tokens that
    those before it left."""
    options: Any = config.tree
    if not drafts_are_drawn(config):
        return None
    paths = {tuple(path) for path in options.paths}
    for path in options.paths:
        before = [*path[:-1], path[-1] - 1] if path else []
        if path and path[-1] > 0 and tuple(before) not in paths:
            shown, missing = (",".join(map(str, ranks)) for ranks in (path, before))
            return (
                f"tree.paths: [{shown}] with drafter.draft_sampling=distribution is drawn after [{missing}], which is "
                f"missing; add [{missing}]"
            )
    return None


def make(options: StaticTreeConfig, build: DrafterBuild) -> StaticTree:
    """Make tree=static."""
    from spec_lab.core.draft_paths import DraftPaths
    from spec_lab.drafters.growth import StaticTree

    return StaticTree(DraftPaths(options.paths), build.device)


def noting(tree: StaticTree, confidences: RowConfidences) -> ConfidentStaticTree:
    """Make a tree that records confidences, so that branches may end early and rows may be left out."""
    from spec_lab.drafters.confident_trees import ConfidentStaticTree

    return ConfidentStaticTree(tree, confidences)


ROW = TreeOption(
    name="static",
    schema=StaticTreeConfig,
    sizes=static_sizes,
    make=make,
    noting=noting,
    refusals=(paths_are_a_tree, siblings_are_drawn, drawn_ranks_have_no_gap),
)
