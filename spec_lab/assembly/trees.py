"""The shapes of a round's drafts: their keys, what they refuse, and a row for each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Any

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import DraftSampling
from spec_lab.assembly.option import TreeOption
from spec_lab.assembly.tree_sizes import TreeSizes
from spec_lab.bounds import out_of_bounds
from spec_lab.config import Choice, RunConfig, TreeConfig, knob

LOADER = "spec_lab.assembly.trees_loader"
MAX_ROWS = 64
MAX_TOPK = 16
MAX_DEPTH = 16

# As wide as the first level of a dynamic tree and of its rows, and deepest below the likeliest draft.
DEFAULT_PATHS = [
    [0], [1], [2], [3],
    [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0],
    [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [1, 0, 0],
]  # fmt: skip


class TreeBranches(Choice):
    """The keys that a branch sees behind the committed ones."""

    exact = "exact", "its ancestors'"
    approximate = "approximate", "those of whatever stood in its place, as SGLang"


@dataclass
class DynamicTreeConfig(TreeConfig):
    """tree=dynamic: which drafts are in the tree follows from their probabilities (EAGLE-2)."""

    name: str = "dynamic"
    topk: int = knob(4, "branches a level, and drafts looked at below each", least=1, most=MAX_TOPK)
    depth: int = knob(
        3, "levels of drafts: the longest path, which stands for drafter.num_draft_tokens", least=1, most=MAX_DEPTH
    )
    num_rows: int = knob(16, "rows a request that are verified, the pending token with them", least=2, most=MAX_ROWS)
    branches: TreeBranches = knob(TreeBranches.exact, "whose keys a branch sees in the drafter's cache")


@dataclass
class StaticTreeConfig(TreeConfig):
    """tree=static: the same paths in every round."""

    name: str = "static"
    paths: list[list[int]] = knob(DEFAULT_PATHS, "a list for each draft: the ranks of its ancestors, then its own")
    replacement: bool = knob(
        False, "drawn siblings are independent, and may be equal; drafter.draft_sampling=distribution only"
    )


def dynamic_sizes(options: DynamicTreeConfig) -> TreeSizes:
    """The sizes of a dynamic tree stand in its keys."""
    width = options.topk if options.depth > 1 else 1
    return TreeSizes(options.depth, options.num_rows, options.topk, width, spine=options.depth)


def static_sizes(options: StaticTreeConfig) -> TreeSizes:
    """The sizes of a static tree follow from its paths."""
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


def dynamic_rows_exist(config: RunConfig) -> str | None:
    """A dynamic tree verifies no more drafts than it scores; sizes out of their bounds are refused as such."""
    options: Any = config.tree
    most = options.topk + (options.depth - 1) * options.topk**2 + 1
    if options.num_rows <= most or out_of_bounds(options):
        return None
    return (
        f"tree.num_rows={options.num_rows} is more than the {most} rows that tree.topk={options.topk} "
        f"tree.depth={options.depth} score; use tree.num_rows={most}"
    )


def branches_have_keys(config: RunConfig) -> str | None:
    """Only a drafter that writes keys for its branches can see those of a stranger."""
    options: Any = config.tree
    if options.branches == TreeBranches.exact or config.drafter.name not in ("frozen_kv", "ngram"):
        return None
    return (
        f"tree.branches=approximate changes nothing with drafter={config.drafter.name}, whose branches write no keys; "
        "use tree.branches=exact or drafter=eagle3"
    )


def paths_are_a_tree(config: RunConfig) -> str | None:
    """Every path of a static tree is there once, of ranks that there are, below a path that is there too."""
    options: Any = config.tree
    if not 1 <= len(options.paths) < MAX_ROWS:
        return f"tree.paths has {len(options.paths)} drafts, outside 1..{MAX_ROWS - 1}; use tree.paths=[[0],[1],[0,0]]"
    paths = {tuple(path) for path in options.paths}
    for path in options.paths:
        shown = ",".join(map(str, path))
        if not path or not all(0 <= rank < MAX_TOPK for rank in path):
            return f"tree.paths: [{shown}] must be ranks of 0..{MAX_TOPK - 1}, at least one; use [0]"
        if len(path) > MAX_DEPTH:
            return f"tree.paths: [{shown}] is {len(path)} drafts long, the longest there can be is {MAX_DEPTH}; cut it"
        if options.paths.count(path) > 1:
            return f"tree.paths names [{shown}] more than once; name each draft once"
        if len(path) > 1 and tuple(path[:-1]) not in paths:
            above = ",".join(map(str, path[:-1]))
            return f"tree.paths: [{shown}] hangs below [{above}], which is not there; add [{above}]"
    return None


def siblings_are_drawn(config: RunConfig) -> str | None:
    """The likeliest tokens differ anyway."""
    options: Any = config.tree
    if not options.replacement or branches_are_drawn(config):
        return None
    return (
        "tree.replacement=true is about drawn siblings, and drafter.draft_sampling=greedy draws none; leave it out or "
        "use drafter.draft_sampling=distribution"
    )


def drawn_ranks_have_no_gap(config: RunConfig) -> str | None:
    """A drawn sibling was drawn from what those before it left, all of which must be there to be read."""
    options: Any = config.tree
    if not branches_are_drawn(config):
        return None
    paths = {tuple(path) for path in options.paths}
    for path in options.paths:
        before = [*path[:-1], path[-1] - 1] if path else []
        if path and path[-1] > 0 and tuple(before) not in paths:
            shown, missing = (",".join(map(str, ranks)) for ranks in (path, before))
            return (
                f"tree.paths: [{shown}] with drafter.draft_sampling=distribution is drawn behind [{missing}], which is "
                f"not there; add [{missing}]"
            )
    return None


def branches_are_drawn(config: RunConfig) -> bool:
    """Tell whether the drafts of a run are sampled."""
    sampling = getattr(config.drafter, "draft_sampling", DraftSampling.greedy)
    return bool(sampling != DraftSampling.greedy)


def drawn_branches_are_not_chosen(config: RunConfig) -> str | None:
    """A choice among drawn drafts by their probability would leave those that are not what the drafter's law says."""
    if not branches_are_drawn(config):
        return None
    return (
        "drafter.draft_sampling=distribution with tree=dynamic, which keeps the likeliest of what was drawn, would "
        "bend the law of the drafts; use tree=static or drafter.draft_sampling=greedy"
    )


OPTIONS = (
    TreeOption(name="none"),
    TreeOption(
        name="dynamic",
        schema=DynamicTreeConfig,
        sizes=dynamic_sizes,
        make=Deferred(LOADER, "dynamic_tree"),
        refusals=(dynamic_rows_exist, branches_have_keys, drawn_branches_are_not_chosen),
    ),
    TreeOption(
        name="static",
        schema=StaticTreeConfig,
        sizes=static_sizes,
        make=Deferred(LOADER, "static_tree"),
        refusals=(paths_are_a_tree, siblings_are_drawn, drawn_ranks_have_no_gap),
    ),
)
