"""Makes the factory for `drafter=`, the tree for `tree=`, and parts that the loaders of drafters share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from spec_lab.acceptance.confidences import DraftConfidences, RowConfidences
from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.errors import UserError
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.protocols import Drafter
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.drafters.confidence import ConfidentGreedyPicker, ConfidentPicker
from spec_lab.drafters.growth import TreeShape
from spec_lab.drafters.history import TokenHistory
from spec_lab.drafters.picking import BiasedGreedyPicker, DraftPicker, GreedyPicker, SamplingPicker
from spec_lab.drafters.siblings import DrawnSiblings, LikeliestSiblings, SiblingPicker
from spec_lab.menu.choices import DraftSampling
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import TrainedDrafterConfig
from spec_lab.menu.registry import made
from spec_lab.wiring.limits import Limits
from spec_lab.wiring.models import DrafterBuild


def unmeasured(_: str) -> AbstractContextManager[None]:
    """Do nothing in place of a timer."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """The parts of one engine that its drafter may use.

    Attributes:
        target_cache: for drafters that read the target's KV.
        confidences: where the drafter of a chain stores its confidences; None if they are not used.
        row_confidences: the same for the drafter of a tree.
        span: times a named part of the drafter's work, within the stage that it belongs to: `with
            resources.span("look_up"): ...`.
    """

    limits: Limits
    prune: PrunePolicy
    seeds: SlotSeeds
    target_cache: PagedKVCache
    confidences: DraftConfidences | None = None
    row_confidences: RowConfidences | None = None
    span: Callable[[str], AbstractContextManager[None]] = unmeasured


DrafterFactory = Callable[[DrafterResources], Drafter[Any]]


def load_drafter(chosen: Chosen, build: DrafterBuild) -> DrafterFactory:
    """Load the drafter's weights, if it has any. The factory then makes a drafter with them for each engine."""
    name = "load" if chosen.sizes is None else "load_tree"
    load = getattr(chosen.drafter, name)
    assert load is not None, "a tree with a drafter of chains is refused earlier"
    factory: DrafterFactory = made(load(chosen, chosen.config.drafter, build), chosen.drafter, name)
    return factory


def make_picker(
    chosen: Chosen, options: TrainedDrafterConfig, build: DrafterBuild, resources: DrafterResources
) -> DraftPicker:
    """Make the picker of the drafter's tokens, which also stores confidences if they are used."""
    biased = getattr(chosen.config.acceptance, "allow_lossy", False)
    is_greedy = options.draft_sampling == DraftSampling.greedy
    confidences = resources.confidences
    if is_greedy and not biased:
        return GreedyPicker() if confidences is None else ConfidentGreedyPicker(confidences)
    picker = _sampling_picker(chosen, options, build, resources, is_greedy)
    return picker if confidences is None else ConfidentPicker(picker, confidences)


def _sampling_picker(
    chosen: Chosen, options: TrainedDrafterConfig, build: DrafterBuild, resources: DrafterResources, is_greedy: bool
) -> DraftPicker:
    """Make the picker that samples, or that takes the likeliest token but reports it as sampled."""
    num_slots, num_draft_tokens = resources.limits.num_slots, options.num_draft_tokens
    kept = DraftLogits(num_slots, num_draft_tokens, build.target.vocab_size, build.device)
    picker = BiasedGreedyPicker if is_greedy else SamplingPicker
    return picker(chosen.config.sampling.temperature, resources.seeds, kept, build.kernels)


def token_history(resources: DrafterResources, build: DrafterBuild) -> TokenHistory:
    """Make the token history of an engine's slots, for drafters that look drafts up."""
    limits = resources.limits
    return TokenHistory(limits.num_slots, limits.max_seq_len + limits.margin + 1, build.device)


def build_tree_shape(chosen: Chosen, build: DrafterBuild) -> TreeShape[Any]:
    """Make the tree of a run that has one."""
    assert chosen.tree.make is not None, "called only for runs with a tree"
    return made(chosen.tree.make(chosen.config.tree, build), chosen.tree, "make")


def shape_of_engine(chosen: Chosen, shape: TreeShape[Any], resources: DrafterResources) -> TreeShape[Any]:
    """Return the tree for one engine's drafter, which also stores how likely its rows are if that is used."""
    confidences = resources.row_confidences
    if confidences is None:
        return shape
    assert chosen.tree.noting is not None, "a tree that stores no confidences is refused earlier"
    return chosen.tree.noting(shape, confidences)


def build_siblings(
    chosen: Chosen, build: DrafterBuild, resources: DrafterResources, shape: TreeShape[Any]
) -> SiblingPicker:
    """Make the picker of a branch's child tokens."""
    drafter: Any = chosen.config.drafter
    if drafter.draft_sampling == DraftSampling.greedy:
        return LikeliestSiblings(shape.topk, build.kernels)
    options: Any = chosen.config.tree
    paths, temperature = DraftPaths(options.paths), chosen.config.sampling.temperature
    kept = DraftLogits(resources.limits.num_slots, len(paths.branches), build.target.vocab_size, build.device)
    return DrawnSiblings(paths, shape.topk, options.replacement, temperature, resources.seeds, kept)


def tree_backend(build: DrafterBuild) -> TreeAttentionBackend:
    """Return the attention backend of a run with a tree, typed as a backend that supports trees."""
    backend: Any = build.backend
    of_trees: TreeAttentionBackend = backend
    return of_trees


def refuse_few_tokens(topk: int, num_tokens: int) -> None:
    """Raise UserError if a drafter scores fewer tokens than a branch has candidate children."""
    if topk > num_tokens:
        raise UserError(
            f"the tree has {topk} branches below a draft, but the drafter scores only {num_tokens} tokens; use "
            f"tree.topk={num_tokens}, or ranks below {num_tokens} in tree.paths"
        )
