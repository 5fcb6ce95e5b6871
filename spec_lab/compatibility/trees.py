"""Refuses what cannot be with a tree of drafts. Functions like those of `compatibility.run`; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from spec_lab.assembly import registry
from spec_lab.assembly.graphs import DraftMetadata
from spec_lab.assembly.run_tree import tree_sizes
from spec_lab.config import RunConfig

Check = Callable[[RunConfig], str | None]


def depth_is_k(config: RunConfig) -> str | None:
    """The drafts of a tree's longest path are the K of everything that counts drafts by their position."""
    sizes = tree_sizes(config)
    if sizes is None or config.drafter.num_draft_tokens in (0, sizes.depth):
        return None
    return (
        f"drafter.num_draft_tokens={config.drafter.num_draft_tokens} is not the depth of tree={config.tree.name}, "
        f"{sizes.depth}, which stands for it; leave out drafter.num_draft_tokens"
    )


def branches_are_drafted(config: RunConfig) -> str | None:
    """The drafter drafts the branches of a tree."""
    drafter = registry.of(config).drafter(config)
    if drafter.load_tree is not None:
        return None
    return f"drafter={drafter.name} drafts no branches of tree={config.tree.name}; use tree=none or drafter=frozen_kv"


def branches_are_judged(config: RunConfig) -> str | None:
    """The acceptance rule judges trees."""
    rule = registry.of(config).rule(config)
    if rule.walk is not None:
        return None
    return f"acceptance={rule.name} judges no tree={config.tree.name}; use tree=none or acceptance=strict"


def branches_are_masked(config: RunConfig) -> str | None:
    """The attention backend masks the rows of a tree."""
    attention = registry.of(config).attention(config)
    if attention.make_for_trees is not None:
        return None
    return f"attention={attention.name} masks no rows of tree={config.tree.name}; use tree=none or attention=torch"


def graph_runs_trees(config: RunConfig) -> str | None:
    """The graph mode runs draft steps of several rows a request."""
    graph = registry.of(config).graph(config)
    if graph.runs_trees:
        return None
    return f"graph={graph.name} runs no draft steps of tree={config.tree.name}; use tree=none or graph=full_loop"


def recorded_rows_are_a_chain(config: RunConfig) -> str | None:
    """Verify rows are kept by position, of which a tree has several rows."""
    if config.record.topk < 1:
        return None
    return f"record.topk={config.record.topk} keeps the rows of a chain; use tree=none or record.topk=0"


def metadata_is_not_moved(config: RunConfig) -> str | None:
    """Every level of a tree has metadata of its own, which nothing can leave stale."""
    if getattr(config.graph, "metadata", None) != DraftMetadata.stale:
        return None
    return (
        f"graph.metadata=stale changes nothing with tree={config.tree.name}; use tree=none or graph.metadata=in_place"
    )


def _with_a_tree(check: Check) -> Check:
    """Make of a check the same one, asked only of runs that have a tree."""

    @wraps(check)
    def asked(config: RunConfig) -> str | None:
        return None if tree_sizes(config) is None else check(config)

    return asked


TREE_CHECKS: tuple[Check, ...] = tuple(
    map(
        _with_a_tree,
        (
            depth_is_k,
            branches_are_drafted,
            branches_are_judged,
            branches_are_masked,
            graph_runs_trees,
            recorded_rows_are_a_chain,
            metadata_is_not_moved,
        ),
    )
)
