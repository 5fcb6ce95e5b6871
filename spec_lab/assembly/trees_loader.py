"""This module makes the tree that `tree=` names."""

from __future__ import annotations

from typing import Any, cast

from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.drafters.trained import DraftSampling
from spec_lab.assembly.heads import DrafterResources
from spec_lab.assembly.models import DrafterBuild
from spec_lab.assembly.trees import DynamicTreeConfig, StaticTreeConfig, TreeBranches
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.drafters.growth import DynamicTree, StaticTree, TreeShape
from spec_lab.drafters.siblings import DrawnSiblings, SiblingPicker
from spec_lab.errors import UserError


def dynamic_tree(options: DynamicTreeConfig, build: DrafterBuild) -> DynamicTree:
    """Make tree=dynamic."""
    exact, choices = options.branches == TreeBranches.exact, build.kernels.trees.choices
    return DynamicTree(options.depth, options.num_rows, options.topk, exact, choices)


def static_tree(options: StaticTreeConfig, build: DrafterBuild) -> StaticTree:
    """Make tree=static."""
    return StaticTree(DraftPaths(options.paths), build.device)


def build_tree_shape(chosen: Chosen, build: DrafterBuild) -> TreeShape[Any]:
    """Make the tree of a run that has one."""
    assert chosen.tree.make is not None, "only runs with a tree are asked"
    return chosen.tree.make(chosen.config.tree, build)


def build_siblings(
    chosen: Chosen, build: DrafterBuild, resources: DrafterResources, shape: TreeShape[Any]
) -> SiblingPicker:
    """Decide how the drafter picks what hangs below a branch."""
    drafter: Any = chosen.config.drafter
    if drafter.draft_sampling == DraftSampling.greedy:
        return build.kernels.trees.likeliest_siblings(shape.topk)
    options: Any = chosen.config.tree
    paths, temperature = DraftPaths(options.paths), chosen.config.sampling.temperature
    kept = DraftLogits(resources.limits.num_slots, len(paths.branches), build.target.vocab_size, build.device)
    return DrawnSiblings(paths, shape.topk, options.replacement, temperature, resources.seeds, kept)


def tree_backend(build: DrafterBuild) -> TreeAttentionBackend:
    """Return the backend of a run that has a tree, which was made for one."""
    backend: Any = build.backend
    return cast("TreeAttentionBackend", backend)


def refuse_few_tokens(topk: int, num_tokens: int) -> None:
    """Raise UserError where a drafter knows fewer tokens than are looked at below a branch."""
    if topk > num_tokens:
        raise UserError(
            f"the tree has {topk} branches below a draft, and the drafter's vocabulary {num_tokens} tokens; "
            f"use tree.topk={num_tokens}, or such ranks in tree.paths"
        )
