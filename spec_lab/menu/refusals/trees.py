"""Checks runs with a tree of drafts. Each function is a check, as in `menu.refusals.run`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from spec_lab.menu.choices import DraftMetadata
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.refusals.drafters import lossless_rule

Check = Callable[[Chosen], str | None]


def depth_is_k(chosen: Chosen) -> str | None:
    """K must be the depth of the tree, since drafts are counted by position up to K."""
    config = chosen.config
    sizes = chosen.sizes
    if sizes is None or not chosen.drafter.drafts or config.drafter.num_draft_tokens == sizes.depth:
        return None
    return (
        f"drafter.num_draft_tokens={config.drafter.num_draft_tokens} is not the depth of tree={config.tree.name}, "
        f"{sizes.depth}, which sets it; leave out drafter.num_draft_tokens"
    )


def branches_are_drafted(chosen: Chosen) -> str | None:
    """The drafter drafts the branches of a tree."""
    drafter = chosen.drafter
    if drafter.load_tree is not None:
        return None
    return (
        f"drafter={drafter.name} cannot draft the branches of tree={chosen.tree.name}; "
        "use tree=none or drafter=frozen_kv"
    )


def branches_are_judged(chosen: Chosen) -> str | None:
    """The acceptance rule judges trees."""
    rule = chosen.rule
    if rule.walk is not None:
        return None
    remedy = f"use tree=none or {lossless_rule(chosen.config)}"
    return f"acceptance={rule.name} judges no tree={chosen.tree.name}; {remedy}"


def branches_are_masked(chosen: Chosen) -> str | None:
    """The attention backend masks the rows of a tree."""
    attention = chosen.attention
    if attention.make_for_trees is not None:
        return None
    return (
        f"attention={attention.name} cannot mask the rows of tree={chosen.tree.name}; use tree=none or attention=torch"
    )


def graph_runs_trees(chosen: Chosen) -> str | None:
    """The graph mode runs draft steps of several rows a request."""
    graph = chosen.graph
    if graph.runs_trees:
        return None
    return f"graph={graph.name} cannot run the draft steps of tree={chosen.tree.name}; use tree=none or graph=full_loop"


def recorded_rows_are_a_chain(chosen: Chosen) -> str | None:
    """Verify rows cannot be recorded, since they are recorded by position, and a tree has several rows for one."""
    config = chosen.config
    if config.record.topk < 1:
        return None
    return f"record.topk={config.record.topk} keeps the rows of a chain; use tree=none or record.topk=0"


def metadata_is_not_moved(chosen: Chosen) -> str | None:
    """Metadata cannot be stale, since every level of a tree builds its own."""
    config = chosen.config
    if getattr(config.graph, "metadata", None) != DraftMetadata.stale:
        return None
    return (
        f"graph.metadata=stale changes nothing with tree={config.tree.name}; use tree=none or graph.metadata=in_place"
    )


def _with_a_tree(check: Check) -> Check:
    """Return the same check restricted to runs with a tree."""

    @wraps(check)
    def asked(chosen: Chosen) -> str | None:
        return None if chosen.sizes is None else check(chosen)

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
