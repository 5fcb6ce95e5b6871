"""The sizes of a draft tree, which other parts are made to, and its depth, which stands for K. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from spec_lab.menu import registry
from spec_lab.menu.choices import DraftSampling
from spec_lab.menu.config import RunConfig
from spec_lab.menu.option import TreeOption

MAX_ROWS, MAX_TOPK, MAX_DEPTH = 64, 16, 16


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """The fixed sizes of a tree, whatever tokens are in it.

    Attributes:
        depth: drafts on its longest path, which stand for K: a round emits 1..depth + 1 tokens.
        num_rows: rows a request that verify runs: the pending token, which is the root, and the drafts.
        topk: likeliest continuations that are looked at of a drafted token.
        width: rows a request of the widest draft step.
        spine: drafts on the path of likeliest ones, as far as a tree is bound to have a place for them.
    """

    depth: int
    num_rows: int
    topk: int
    width: int
    spine: int


def with_depth_as_k(config: RunConfig) -> RunConfig:
    """Return the same run with K as deep as its tree, unless somebody set K: what then differs is refused."""
    name = config.tree.name
    options = registry.load(config.extensions).options(TreeOption)
    if name not in options or (sizes := options[name].sizes) is None:
        return config
    drafter = config.drafter
    usual = next(field.default for field in dataclasses.fields(drafter) if field.name == "num_draft_tokens")
    if drafter.num_draft_tokens != usual or usual == 0:
        return config
    drafter = dataclasses.replace(drafter, num_draft_tokens=sizes(config.tree).depth)
    return dataclasses.replace(config, drafter=drafter)


def branches_are_drawn(config: RunConfig) -> bool:
    """Tell whether the drafts of a run are sampled."""
    sampling = getattr(config.drafter, "draft_sampling", DraftSampling.greedy)
    return bool(sampling != DraftSampling.greedy)
