"""tree=dynamic: its keys, sizes, refusals, and the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.menu import registry
from spec_lab.menu.bounds import out_of_bounds
from spec_lab.menu.choices import Choice
from spec_lab.menu.chosen import drafts_are_drawn
from spec_lab.menu.config import RunConfig, TreeConfig, knob
from spec_lab.menu.option import MAX_DEPTH, MAX_ROWS, MAX_TOPK, DrafterOption, TreeOption, TreeSizes

if TYPE_CHECKING:
    from spec_lab.acceptance.confidences import RowConfidences
    from spec_lab.drafters.confident_trees import ConfidentDynamicTree
    from spec_lab.drafters.growth import DynamicTree
    from spec_lab.wiring.models import DrafterBuild


class TreeBranches(Choice):
    """The keys after the committed ones that a branch sees."""

    exact = "exact", "its ancestors'"
    approximate = "approximate", "those of the branch that was in its place before, as in SGLang"


@dataclass
class DynamicTreeConfig(TreeConfig):
    """tree=dynamic: each round chooses which drafts are in the tree, as in EAGLE-2."""

    name: str = "dynamic"
    topk: int = knob(4, "number of branches in a level, and of candidates below each", least=1, most=MAX_TOPK)
    depth: int = knob(3, "number of levels, which is also drafter.num_draft_tokens", least=1, most=MAX_DEPTH)
    num_rows: int = knob(16, "verify rows of a request, including the pending token", least=2, most=MAX_ROWS)
    branches: TreeBranches = knob(TreeBranches.exact, "whose keys a branch sees in the drafter's cache")


def dynamic_sizes(options: DynamicTreeConfig) -> TreeSizes:
    """Return the sizes of a dynamic tree, which are given by its keys."""
    width = options.topk if options.depth > 1 else 1
    return TreeSizes(options.depth, options.num_rows, options.topk, width, spine=options.depth)


def dynamic_rows_exist(config: RunConfig) -> str | None:
    """A dynamic tree verifies no more drafts than it scores. Sizes out of bounds are refused elsewhere."""
    options: Any = config.tree
    most = options.topk + (options.depth - 1) * options.topk**2 + 1
    if options.num_rows <= most or out_of_bounds(options):
        return None
    return (
        f"tree.num_rows={options.num_rows} is more than the {most} rows that tree.topk={options.topk} "
        f"tree.depth={options.depth} score; use tree.num_rows={most}"
    )


def branches_have_keys(config: RunConfig) -> str | None:
    """Letting branches see each other's keys needs a drafter that writes keys for its branches."""
    options: Any = config.tree
    drafter = registry.load(config.extensions).options(DrafterOption)[config.drafter.name]
    if options.branches == TreeBranches.exact or not drafter.no_branch_keys:
        return None
    return (
        f"tree.branches=approximate changes nothing with drafter={config.drafter.name}, whose branches write no keys; "
        "use tree.branches=exact or drafter=eagle3"
    )


def drawn_branches_are_not_chosen(config: RunConfig) -> str | None:
    """Drafts must not be sampled: choosing among sampled drafts by probability would change their distribution."""
    if not drafts_are_drawn(config):
        return None
    return (
        "drafter.draft_sampling=distribution with tree=dynamic, which keeps the likeliest of the drawn drafts, would "
        "change the distribution of the drafts; use tree=static or drafter.draft_sampling=greedy"
    )


def make(options: DynamicTreeConfig, build: DrafterBuild) -> DynamicTree:
    """Make tree=dynamic."""
    from spec_lab.drafters.growth import DynamicTree

    exact = options.branches == TreeBranches.exact
    return DynamicTree(options.depth, options.num_rows, options.topk, exact, build.kernels)


def noting(tree: DynamicTree, confidences: RowConfidences) -> ConfidentDynamicTree:
    """Make a tree that records confidences, so that branches may end early and rows may be left out."""
    from spec_lab.drafters.confident_trees import ConfidentDynamicTree

    return ConfidentDynamicTree(tree, confidences)


ROW = TreeOption(
    name="dynamic",
    schema=DynamicTreeConfig,
    sizes=dynamic_sizes,
    make=make,
    noting=noting,
    refusals=(dynamic_rows_exist, branches_have_keys, drawn_branches_are_not_chosen),
)
