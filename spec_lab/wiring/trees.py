"""This module makes the tree that `tree=` names."""

from __future__ import annotations

from typing import Any

from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.errors import UserError
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.drafters.growth import TreeShape
from spec_lab.drafters.siblings import DrawnSiblings, LikeliestSiblings, SiblingPicker
from spec_lab.menu.choices import DraftSampling
from spec_lab.menu.chosen import Chosen
from spec_lab.wiring.drafting import DrafterResources
from spec_lab.wiring.models import DrafterBuild


def build_tree_shape(chosen: Chosen, build: DrafterBuild) -> TreeShape[Any]:
    """Make the tree of a run that has one."""
    assert chosen.tree.make is not None, "only runs with a tree are asked"
    return chosen.tree.make(chosen.config.tree, build)


def shape_of_engine(chosen: Chosen, shape: TreeShape[Any], resources: DrafterResources) -> TreeShape[Any]:
    """Return the tree as one engine's drafter grows it: it notes how likely its rows are, where anything asks."""
    confidences = resources.row_confidences
    if confidences is None:
        return shape
    assert chosen.tree.noting is not None, "a tree whose rows all count is refused"
    return chosen.tree.noting(shape, confidences)


def build_siblings(
    chosen: Chosen, build: DrafterBuild, resources: DrafterResources, shape: TreeShape[Any]
) -> SiblingPicker:
    """Decide how the drafter picks what hangs below a branch."""
    drafter: Any = chosen.config.drafter
    if drafter.draft_sampling == DraftSampling.greedy:
        return LikeliestSiblings(shape.topk, build.kernels)
    options: Any = chosen.config.tree
    paths, temperature = DraftPaths(options.paths), chosen.config.sampling.temperature
    kept = DraftLogits(resources.limits.num_slots, len(paths.branches), build.target.vocab_size, build.device)
    return DrawnSiblings(paths, shape.topk, options.replacement, temperature, resources.seeds, kept)


def tree_backend(build: DrafterBuild) -> TreeAttentionBackend:
    """Return the backend of a run that has a tree, which was made for one."""
    backend: Any = build.backend
    of_trees: TreeAttentionBackend = backend
    return of_trees


def refuse_few_tokens(topk: int, num_tokens: int) -> None:
    """Raise UserError where a drafter scores fewer tokens than are looked at below a branch."""
    if topk > num_tokens:
        raise UserError(
            f"the tree has {topk} branches below a draft, and the drafter scores {num_tokens} tokens; "
            f"use tree.topk={num_tokens}, or such ranks in tree.paths"
        )
